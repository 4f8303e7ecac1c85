"""Models that fail, and runs of them."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, run_agent
from agentruns.models import Run
from agentruns.providers.base import ProviderError
from agentruns.testing import ScriptedModel, check_messages
from tests.db.helpers import the_run
from tests.shop.agents import TOOLS


class Flaky:
    """Raises what it was given, one error a request, then follows the script."""

    def __init__(self, errors: list[Exception], turns: list[Any]) -> None:
        self.errors = errors
        self.script = ScriptedModel([*turns, {"text": "all done"}])

    def propose(self, request: Any) -> Any:
        check_messages(request.messages)
        if self.errors:
            raise self.errors.pop(0)
        return self.script.propose(request)


def failing(disposition: str, **facts: Any) -> ProviderError:
    """Build the error of a provider; a retry is due so late that no slow machine comes to it unasked."""
    facts.setdefault("retry_after", 1000.0 if disposition == "retry" else None)
    return ProviderError("no luck", disposition=disposition, type="some_error", **facts)


def start(errors: list[Exception], *turns: Any, **options: Any) -> Run:
    """Run an agent whose model first raises the errors, then says the turns."""
    agent = Agent("flaky", instructions="Try.", tools=TOOLS, model=Flaky(errors, list(turns)), **options)
    return the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
