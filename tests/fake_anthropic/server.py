"""The fake itself: what is answered to which request."""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tests.fake_anthropic.answers import DROPPED, Answer, plain, streamed
from tests.fake_anthropic.author import Author, Script, whole
from tests.fake_anthropic.calls import Call
from tests.fake_anthropic.conversation import check_conversation
from tests.fake_anthropic.errors import Refused
from tests.fake_anthropic.faults import Fault, Faults
from tests.fake_anthropic.http import Server
from tests.fake_anthropic.rules import VERSION, check_breakpoints, check_request
from tests.fake_anthropic.stream import events
from tests.fake_anthropic.tokens import PromptCache, count_request

if TYPE_CHECKING:
    from anthropic import Anthropic

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


class FakeAnthropic:
    """A Messages API on 127.0.0.1 that says what a script says and refuses what the real one refuses.

    `script`: turns as ScriptedModel has them; the conversation's n-th reply is the n-th turn, n being the
    number of assistant messages in the request. Or a function of the request's body that returns a turn.
    In raw content a tool_use whose `input` is text streams that text: JSON cut short by max_tokens.
    `faults`: request number (POSTs to /v1/messages, from 1) -> a kind of fault; see `fault()`.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        faults: Mapping[int, int | str] | None = None,
        api_key: str = "sk-ant-fake-key",
        bend: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self.bend = bend
        self.api_key = api_key
        self.cache = PromptCache()
        self._author = Author(script, self.cache)
        self._faults = Faults(faults)
        self._calls: list[Call] = []
        self._server: Server | None = None
        self._clients: list[Anthropic] = []

    def start(self) -> Self:
        """Listen."""
        self._server = Server(self._respond)
        return self

    def stop(self) -> None:
        """Stop listening; close every connection, every thread and every client of `client()`."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        while self._clients:
            self._clients.pop().close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The base URL."""
        if self._server is None:
            raise RuntimeError("The fake is not running: use it in a with statement, or call start().")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process asks this fake."""
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.api_key}

    def client(self, **options: Any) -> Anthropic:
        """Return a client of the real SDK, without retries unless asked for; `stop()` closes it."""
        import anthropic

        if "http_client" not in options:
            # No proxy, and no certificates: loading them takes longer than most tests.
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            options["http_client"] = anthropic.DefaultHttpxClient(verify=bare, trust_env=False)
        given = {"api_key": self.api_key, "base_url": self.url, "max_retries": 0, **options}
        client = anthropic.Anthropic(**given)
        self._clients.append(client)
        return client

    @property
    def calls(self) -> list[Call]:
        """Every request so far, in the order they were answered."""
        return list(self._calls)

    def fault(self, kind: int | str, *, at: int | None = None, **options: Any) -> None:
        """Let request number `at` meet a fault, or the next one; the options are the fields of Fault."""
        self._faults.plan(at, kind, **options)

    def _respond(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        route = urlsplit(path).path
        request_id = f"req_{secrets.token_hex(12)}"
        named = {"request-id": request_id}
        fault = self._faults.next() if (method, route) == ("POST", MESSAGES) else None
        error, body = "", _parsed(raw)
        if fault and fault.kind == "drop" and fault.after is None:
            answer = DROPPED
        else:
            try:
                if fault and isinstance(fault.kind, int):
                    raise fault.error()
                self._check(route, headers, body)
                answer = self._answer(route, body, fault, named, request_id)
            except Refused as refused:
                error = refused.message
                answer = plain(refused.status, refused.body(request_id), None, {**named, **refused.headers})
        name = str(fault.kind) if fault else ""
        # Before the answer is sent: who has the answer finds the call.
        self._calls.append(Call(method, path, headers, body, answer.status, error, name, request_id))
        return answer

    def _check(self, route: str, headers: dict[str, str], body: Any) -> None:
        if route not in (MESSAGES, COUNT_TOKENS):
            raise Refused("Not found", 404)
        self._check_headers(headers)
        if body is None:
            raise Refused("The request body is not valid JSON")
        check_request(body, counting=route == COUNT_TOKENS)
        check_conversation(body, self._author.replies)
        check_breakpoints(body)

    def _check_headers(self, headers: dict[str, str]) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        if not key:
            raise Refused("x-api-key header is required", 401)
        if not secrets.compare_digest(key.encode(), self.api_key.encode()):
            raise Refused("invalid x-api-key", 401)
        version = headers.get("anthropic-version")
        if not version:
            raise Refused("anthropic-version: header is required")
        if version != VERSION:
            raise Refused(f'anthropic-version: "{version}" is not a valid version')

    def _answer(
        self, route: str, body: Any, fault: Fault | None, headers: dict[str, str], request_id: str
    ) -> Answer:
        if route == COUNT_TOKENS:
            return plain(200, {"input_tokens": count_request(body)}, None, headers)
        message = self._author.message(body)
        if body.get("stream"):
            return streamed(self.bend(list(events(message))), fault, headers, request_id)
        if fault and fault.kind == "error":
            raise fault.error()
        return plain(200, whole(message), fault, headers)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
