"""What the fakes of all APIs are: a server, what it says, what goes wrong, and what it was asked."""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from agentruns.providers.base import ModelRequest, ProviderError
from agentruns.providers.scripted import ScriptedModel, Turn
from tests.fake_anthropic.faults import Faults, Refused
from tests.fake_anthropic.http import DROPPED, Answer, Server, encode_json, plain

Script = Iterable[Turn] | Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A request, its headers with names in lower case.

    `status`: what was answered, 0 if the connection was dropped without an answer. `error`: the text
    of an error, "" for a success. `fault`: the kind of the injected fault, or "".
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    error: str
    fault: str
    request_id: str


class Fake:
    """An API on 127.0.0.1 that says what a script says and refuses what the real one refuses.

    `script`: turns as ScriptedModel has them; the n-th reply of a conversation is the n-th turn. Or a
    function of the request's body that returns a turn. `faults`: request number, from 1 -> a kind of fault;
    see `fault()`. `bend`: changes the events of a stream, as other servers do. `window`: the most tokens of a
    request; `largest`: the most bytes. `poison`: a text that no block may hold, refused with this `status`.
    """

    request_id_header = "request-id"
    # A subclass builds an answer or raises Refused, makes the Refused of a fault, and the body of each.
    answer: Any
    refusal: Any
    error_body: Any

    def __init__(
        self,
        script: Script = (),
        *,
        api_key: str,
        faults: Mapping[int, int | str] | None = None,
        bend: Callable[[list[Any]], list[Any]] = list,
        window: int = 200_000,
        largest: int = 32 * 2**20,
        poison: str = "",
        status: int = 400,
    ) -> None:
        self.largest, self.poison, self.status = largest, poison, status
        self.api_key, self.bend, self.window = api_key, bend, window
        self.calls: list[Call] = []  # in the order they were answered
        self._script = script if callable(script) else ScriptedModel(script)
        self._faults = Faults(faults or {})
        self._server: Server | None = None
        self._clients: list[Any] = []

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
        assert self._server is not None, "The fake is not running: use it in a with statement, or start() it."
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def make_client(self, sdk: Any, kind: str, **options: Any) -> Any:
        """Make a client of the real SDK; `stop()` closes it."""
        if "http_client" not in options:
            # No proxy, and no certificates: loading them takes longer than most tests.
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            options["http_client"] = sdk.DefaultHttpxClient(verify=bare, trust_env=False)
        client = getattr(sdk, kind)(**{"api_key": self.api_key, "base_url": self.url, **options})
        self._clients.append(client)
        return client

    def fault(self, kind: int | str, *, at: int | None = None, **options: Any) -> None:
        """Let request number `at` meet a fault, or the next one; the options are the fields of Fault."""
        self._faults.plan(at, kind, **options)

    def is_counted(self, method: str, route: str) -> bool:
        """Tell whether a request has a number, and so may meet a fault."""
        return True

    def check_content(self, body: Any, where: str) -> None:
        """Refuse a body that is too large, and a poisoned block, of which the first is named."""
        if len(encode_json(body)) > self.largest:
            raise Refused("Request exceeds the maximum allowed number of bytes.", 413)
        for number, message in enumerate(body[where]):
            content = message.get("content")
            for place, block in enumerate(content if isinstance(content, list) else [message]):
                if self.poison and self.poison in json.dumps(block):
                    at = f"{where}.{number}.content.{place}"
                    raise Refused(f"{at}: This content cannot be processed.", self.status)

    def turn(self, body: Any, step: int) -> tuple[list[Any], str | None, dict[str, Any]]:
        """Write the content, stop reason and usage of a reply; what a script cannot say nobody retries."""
        script = self._script
        if not isinstance(script, ScriptedModel):
            tell = script
            script, step = ScriptedModel([lambda request: tell(body)]), 0
        # The ids of calls come from the run's: every generation has new ones.
        request = ModelRequest(body["model"], "", [], run_id=secrets.token_hex(8), step=step)
        try:
            reply = script.propose(request)
            content, usage = json.loads(json.dumps([reply.content, reply.usage]))
        except ProviderError as error:
            raise Refused(f"script exhausted: {error}") from None
        except Exception as error:
            raise Refused(f"The script failed: {type(error).__name__}: {error}") from error
        return content, reply.stop_reason, usage

    def _respond(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        route = urlsplit(path).path
        request_id = f"req_{secrets.token_hex(12)}"
        named = {self.request_id_header: request_id}
        fault = self._faults.next() if self.is_counted(method, route) else None
        error, body = "", json.loads(raw or b"null")
        if fault and fault.kind == "drop" and fault.after is None:
            answer = DROPPED
        else:
            try:
                if fault and isinstance(fault.kind, int):
                    raise self.refusal(fault)
                answer = self.answer(route, headers, body, fault, named)
            except Refused as refused:
                error, told = refused.message, self.error_body(refused, request_id)
                answer = plain(refused.status, told, None, {**named, **refused.headers})
        name = str(fault.kind) if fault else ""
        # Before the answer is sent: who has the answer finds the call.
        self.calls.append(Call(method, path, headers, body, answer.status, error, name, request_id))
        return answer
