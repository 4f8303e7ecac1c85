"""A script in the place of an agent's model, for one test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from agentruns.providers.base import ModelReply, ModelRequest, model_identity
from agentruns.providers.scripted import ScriptedModel, Turn
from agentruns.testing.messages import check_messages

if TYPE_CHECKING:
    from agentruns.agents.agent import Agent

playing: list[tuple[Agent, Script]] = []


class Script(ScriptedModel):
    """A ScriptedModel that keeps the `requests` it was asked and refuses what a provider would refuse."""

    def __init__(self, turns: Iterable[Turn], identity: str) -> None:
        super().__init__(turns)
        self.identity = identity
        self.requests: list[ModelRequest] = []

    def propose(self, request: ModelRequest) -> ModelReply:
        """Return the next turn; raises InvalidMessages."""
        check_messages(request.messages)
        self.requests.append(request)
        return super().propose(request)


@contextmanager
def scripted_model(agent: Agent | str, turns: Iterable[Turn]) -> Iterator[Script]:
    """Let an agent's model say `turns`, as those of `ScriptedModel`; afterwards its own model is back.

    The agent's definition stays the same, so runs that were started with the real model go on, and the
    other way round.
    """
    from agentruns.agents.agent import get_agent

    found = get_agent(agent)
    script = Script(turns, model_identity(found.model))
    entry = (found, script)
    with patch.object(found, "model", script):
        playing.append(entry)
        try:
            yield script
        finally:
            playing.remove(entry)
