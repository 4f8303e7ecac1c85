"""Models of OpenAI, and of servers with its APIs, through its SDK, imported at the first request."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any, Literal

from agentruns.providers import base, chat, responses
from agentruns.providers.base import ModelReply, ModelRequest, ProviderError, provider_tools, send_text
from agentruns.providers.blocks import usage_of
from agentruns.providers.failures import Answer, SDKModel, plain, refuse
from agentruns.utils import json as canonical

_RESERVED = frozenset({
    "background", "conversation", "input", "instructions", "messages", "model", "n", "previous_response_id",
    "stream", "timeout",
})  # fmt: skip
_OF_OPENAI = re.compile(r"https?://([\w.-]+\.)?(openai|azure)\.com[:/]")  # servers with the Responses API
_ENCRYPTED = re.compile("encrypted.content", re.IGNORECASE)

Collected = responses.Collected | chat.Collected


class OpenAIModel(SDKModel):
    """A model by name, over the Responses API of OpenAI and Azure, or over Chat Completions.

    `api`: "responses" or "chat"; the default is "responses" for servers of OpenAI and Azure, and "chat" for
    all others. `provider`: "openai", "azure", "ollama", "vllm", "openrouter", or your own name of another
    server. `client`: your own OpenAI or AzureOpenAI; its retries are switched off. `timeout` in seconds: for
    a whole reply, or for each read when streaming. `params` are sent with every request, unless an agent's
    own `model_params` replace them. They are no part of a definition. Raises ValueError if `params` lets the
    provider use tools itself.
    """

    package = "openai"

    def __init__(
        self,
        model: str,
        *,
        api: Literal["responses", "chat"] | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        provider: str = "openai",
        client: Any = None,
        timeout: float | None = None,
        streaming: bool = True,
        **params: Any,
    ) -> None:
        if api not in ("responses", "chat", None):
            raise ValueError(f"api must be 'responses' or 'chat', not {api!r}.")
        if named := provider_tools(params):  # no part of a definition: no agent could say that it allows them
            raise ValueError(
                f"{', '.join(named)}: what the provider runs belongs in an agent's model_params."
            )
        super().__init__(model, client, timeout, streaming)
        self.provider = provider
        self.params = params
        own = re.sub(r"\W", "_", provider.upper(), flags=re.ASCII)
        self._quirks = chat.QUIRKS.get(provider, chat.Quirks(key=f"{own}_API_KEY"))
        self._api = api
        self._base_url = base_url or self._quirks.base_url
        self._api_key = api_key
        self._include = True

    @property
    def identity(self) -> str:
        """The names of provider and model. An agent's definition leaves out key, server and client."""
        return f"{self.provider}:{self.name}"

    def ask(self, request: ModelRequest, answer: Answer) -> ModelReply:
        """Send the request to the server's API and read the reply; raises ProviderError and SDK errors."""
        # `max_tokens` of the request replaces the model's own limit under any name.
        replaced = base.LIMITS if "max_tokens" in request.params else ()
        params = {name: each for name, each in self.params.items() if name not in replaced} | request.params
        refuse(params, _RESERVED)
        client = self.client()
        is_openai = _OF_OPENAI.match(str(client.base_url)) is not None
        if (self._api or ("responses" if is_openai else "chat")) == "responses":
            body = canonical.legal(responses.body(request, params, self.identity))
            raw = self._respond(client.responses, body, request, answer)
            return replace(responses.reply(raw, self.identity), request_id=answer.request_id)
        quirks = self._quirks if is_openai or self.provider != "openai" else chat.Quirks()
        body = canonical.legal(chat.body(request, params, self.identity, quirks))
        if self.streaming:
            body["stream_options"] = {"include_usage": True, **body.get("stream_options", {})}
        raw = self._send(client.chat.completions, body, request, answer, chat.Collected(request.tools))
        return replace(chat.reply(raw, self.identity), request_id=answer.request_id)

    def _respond(
        self, api: Any, body: dict[str, Any], request: ModelRequest, answer: Answer
    ) -> dict[str, Any]:
        """Send a request; repeat it without earlier reasoning if the provider cannot read that reasoning."""
        import openai

        if not self._include:
            body = responses.without_reasoning(body, include=False)
        try:
            return self._send(api, body, request, answer, responses.Collected(request.tools))
        except openai.BadRequestError as error:  # for example after a failover to another account
            if not _ENCRYPTED.search(f"{error.code} {error.message}"):
                raise
            self._include = self._include and "not supported" not in error.message
        body = responses.without_reasoning(body, include=self._include)
        return self._send(api, body, request, answer, responses.Collected(request.tools))

    def _send(
        self, api: Any, body: dict[str, Any], request: ModelRequest, answer: Answer, collected: Collected
    ) -> dict[str, Any]:
        given = self.arguments(body, "messages", "input", seconds=self.timeout)
        if not self.streaming:
            whole = api.create(**given)
            answer.request_id = getattr(whole, "_request_id", None) or ""
            return answer.complete(plain(whole))
        with api.create(**given, stream=True) as stream:
            headers = stream.response.headers
            answer.begun, answer.request_id = True, headers.get("x-request-id") or ""
            if "application/json" in headers.get("content-type", ""):  # an error, or no stream
                return answer.complete(json.loads(stream.response.read()))
            for event in stream:
                text = collected.add(plain(event))
                answer.raw = collected.raw
                send_text(self, request, text)
        return answer.complete(collected.whole())

    def make_client(self) -> Any:
        """Build the SDK's client; raises ProviderError if another provider than "openai" has no base_url."""
        import openai

        if self.provider != "openai" and not self._base_url:  # or the SDK would send OpenAI another's key
            text = f"The provider {self.provider!r} needs a base_url, or a client."
            raise ProviderError(text, disposition="pause", type="missing_base_url")
        # The SDK would send OpenAI's key to any server, and asks for one where none is needed.
        elsewhere = self._base_url or os.environ.get("OPENAI_BASE_URL")
        key = self._api_key or os.environ.get(self._quirks.key) or ("none" if elsewhere else None)
        return openai.OpenAI(api_key=key, base_url=self._base_url)

    def usage_in(self, raw: Any) -> dict[str, Any]:
        """Read the usage from the part of an answer that has arrived."""
        return usage_of(raw.get("usage") if isinstance(raw, dict) else None)
