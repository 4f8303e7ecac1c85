"""The provider contract for OpenAI's Responses API."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from agentruns.providers.openai import OpenAIModel
from tests.fake_openai import FakeOpenAI
from tests.providers import contract


class Responses(contract.Provider):
    """OpenAI itself."""

    identity = "openai:gpt-5.4"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return FakeOpenAI(turns, **{"api_key": contract.KEY, **options})

    def model(self, server: Any, **options: Any) -> Any:
        return OpenAIModel("gpt-5.4", api="responses", client=server.client(api_key=contract.KEY), **options)


class TestResponses(contract.NetworkContract):
    provider = Responses()
    overloaded = "server_error"
