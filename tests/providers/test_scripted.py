"""The provider contract for a model that follows a script."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from agentruns.providers.scripted import ScriptedModel
from tests.providers import contract


class Scripted(contract.Provider):
    """A script: nothing goes over a network, and nothing is lost there."""

    has_network = False
    identity = "agentruns.providers.scripted.ScriptedModel"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext([turns] if callable(turns) else turns)

    def model(self, server: Any, **options: Any) -> Any:
        return ScriptedModel(server, pace=0.001 if options["streaming"] else 0)


class TestScripted(contract.Contract):
    provider = Scripted()
