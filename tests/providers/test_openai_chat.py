"""The provider contract for Chat Completions: of OpenAI, and of servers that speak it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from agentruns.providers.openai import OpenAIModel
from tests.fake_openai import FakeOpenAI
from tests.providers import contract


class Chat(contract.Provider):
    """A model of OpenAI's that takes tools here."""

    def __init__(self, name: str, provider: str = "openai", *, reads_files: bool = True) -> None:
        self.name, self.of, self.reads_files = name, provider, reads_files
        self.identity = f"{provider}:{name}"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return FakeOpenAI(turns, **{"api_key": contract.KEY, "takes_files": self.reads_files, **options})

    def model(self, server: Any, **options: Any) -> Any:
        client = server.client(api_key=contract.KEY)
        return OpenAIModel(self.name, provider=self.of, client=client, **options)


class TestElsewhere(contract.NetworkContract):
    provider = Chat("llama3.3")
    overloaded = "server_error"


class TestOllama(contract.NetworkContract):
    provider = Chat("llama3.3", "ollama", reads_files=False)
    overloaded = "server_error"


class TestOpenRouter(contract.NetworkContract):
    provider = Chat("qwen/qwen3", "openrouter")
    overloaded = "503"  # of the server that it asked
