"""The fake itself: what is answered to which request, and what goes wrong on the way."""

from __future__ import annotations

import itertools
import json
import secrets
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from agentruns.providers.base import ModelRequest, ProviderError
from agentruns.providers.scripted import ScriptedModel, Turn
from tests.fake_anthropic.answers import DROPPED, Answer, plain
from tests.fake_anthropic.calls import Call
from tests.fake_anthropic.faults import Fault
from tests.fake_anthropic.http import Server
from tests.fake_anthropic.stream import encode_json
from tests.fake_openai import chat, responses
from tests.fake_openai.rules import Refused

if TYPE_CHECKING:
    from openai import OpenAI

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
_SIZES = (1, 7, 3, 11, 2, 17)  # odd on purpose: deltas end in the middle of words and of JSON
_ERRORS: dict[int, tuple[str, str | None, str]] = {  # type, code, text
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided: sk-***."),
    403: ("permission_error", "unsupported_country_region_territory", "Country not supported."),
    404: ("invalid_request_error", "model_not_found", "The model does not exist."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached."),
    500: ("server_error", None, "The server had an error while processing your request."),
    503: ("service_unavailable_error", "server_is_overloaded", "Our servers are currently overloaded."),
}


class FakeOpenAI:
    """Both APIs on 127.0.0.1: it says what a script says and refuses what the real ones refuse.

    `script`: turns as ScriptedModel has them; the n-th reply of a conversation is the n-th turn. Or a
    function of the request's body that returns a turn. In raw content `{"type": "reasoning"}` and
    `{"type": "refusal", "refusal": ...}` are as OpenAI has them. `models`: the names it knows, or all.
    `bend`: changes the events of a stream, as other servers do.
    """

    def __init__(
        self,
        script: Iterable[Turn] | Callable[[Any], Any] = (),
        *,
        api_key: str = "sk-fake-0123456789abcdef",
        models: Iterable[str] = (),
        takes_files: bool = True,
        bend: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self.api_key, self.models, self.takes_files = api_key, [*models], takes_files
        self.bend = bend
        self.encrypted: set[str] = set()
        self.calls: list[Call] = []
        self._script = script if callable(script) else ScriptedModel(script)
        self._faults: dict[int, Fault] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._clients: list[OpenAI] = []

    def __enter__(self) -> Self:
        self._server = Server(self._respond)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        while self._clients:
            self._clients.pop().close()

    @property
    def url(self) -> str:
        """The base URL."""
        assert self._server is not None, "The fake is not running: use it in a with statement."
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def client(self, kind: str = "OpenAI", **options: Any) -> OpenAI:
        """Return a client of the real SDK, closed with the fake."""
        import openai

        if "http_client" not in options:
            # No proxy, and no certificates: loading them takes longer than most tests.
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            options["http_client"] = openai.DefaultHttpxClient(verify=bare, trust_env=False)
        given = {"api_key": self.api_key, "base_url": self.url, **options}
        client: OpenAI = getattr(openai, kind)(**given)
        self._clients.append(client)
        return client

    def fault(self, kind: int | str, *, times: int = 1, **options: Any) -> None:
        """Let the next requests meet a fault: as those of FakeAnthropic, and `type` is a code of OpenAI's."""
        with self._lock:
            for number in range(times):
                self._faults[self._count + number] = Fault(kind, **options)

    def _respond(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        route = urlsplit(path).path
        request_id = f"req_{secrets.token_hex(12)}"
        named = {"x-request-id": request_id}
        with self._lock:
            fault = self._faults.pop(self._count, None)
            self._count += 1
        error, body = "", None
        try:
            body = json.loads(raw or b"null")
            if fault and fault.kind == "drop" and fault.after is None:
                answer = DROPPED
            else:
                if fault and isinstance(fault.kind, int):
                    raise _refused(fault)
                answer = self._answer(route, headers, body, fault, named)
        except Refused as refused:
            error = refused.message
            answer = plain(refused.status, {"error": refused.error}, None, {**named, **refused.headers})
        name = str(fault.kind) if fault else ""
        # Before the answer is sent: who has the answer finds the call.
        self.calls.append(Call(method, path, headers, body, answer.status, error, name, request_id))
        return answer

    def _answer(
        self, route: str, headers: dict[str, str], body: Any, fault: Fault | None, named: dict[str, str]
    ) -> Answer:
        # A deployment of Azure has the model's name in its address.
        is_chat = route == CHAT or route.endswith("/deployments/gpt-4o/chat/completions")
        if not is_chat and route not in (RESPONSES, "/openai/responses", "/v1/openai/responses"):
            raise Refused(f"Invalid URL (POST {route})", 404)
        key = headers.get("api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.api_key:
            raise Refused("Incorrect API key provided: sk-***.", 401, code="invalid_api_key")
        if self.models and body.get("model") not in self.models:
            text = f"The model `{body.get('model')}` does not exist or you do not have access to it."
            raise Refused(text, 404, code="model_not_found")
        if is_chat:
            chat.check(body, has_files=self.takes_files)
        else:
            responses.check(body, self.encrypted)
        depth = (chat if is_chat else responses).replies(body)
        content, stop, usage = self._turn(body, depth)
        used = (chat if is_chat else responses).usage(*usage)
        if is_chat:
            whole = chat.answer(body, content, stop, used)
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = chat.events(whole, _cut, with_usage=with_usage)
        else:
            whole = responses.answer(body, content, stop, used, self.encrypted)
            events = responses.events(whole, _cut)
        if fault and fault.kind == "error" and not body.get("stream"):
            raise _refused(fault)
        if not body.get("stream"):
            return plain(200, whole, fault, named)
        return _streamed(self.bend([*events]), fault, named, is_chat)

    def _turn(self, body: Any, depth: int) -> tuple[list[Any], str | None, tuple[int, int, int]]:
        script, step = self._script, depth
        if not isinstance(script, ScriptedModel):
            tell = script
            script, step = ScriptedModel([lambda request: tell(body)]), 0
        request = ModelRequest(body["model"], "", [], run_id=secrets.token_hex(8), step=step)
        try:
            reply = script.propose(request)
        except ProviderError as error:
            raise Refused(f"script exhausted: {error}") from None
        size = len(json.dumps(body)) // 4
        given = reply.usage
        usage = (given.get("sent", size), given.get("cached", 0), given.get("written", 7))
        return json.loads(json.dumps(reply.content)), reply.stop_reason, usage


def _refused(fault: Fault) -> Refused:
    status = fault.kind if isinstance(fault.kind, int) else 500
    type, code, text = _ERRORS.get(status, ("invalid_request_error", None, "Something is wrong."))
    given = {"retry-after": fault.retry_after, "retry-after-ms": fault.retry_after_ms}
    headers = {name: str(value) for name, value in given.items() if value is not None}
    code = fault.error_code or code
    return Refused(fault.message or text, status, code=code, type=type, headers=headers)


def _streamed(
    events: list[dict[str, Any]], fault: Fault | None, named: dict[str, str], is_chat: bool
) -> Answer:
    headers = {"content-type": "text/event-stream; charset=utf-8", **named}
    chunks = [_encoded(event, is_chat) for event in events] + ([b"data: [DONE]\n\n"] if is_chat else [])
    if fault is None:
        return Answer(200, headers, chunks)
    cut = min(3 if fault.after is None else fault.after, len(events) - 1)
    pause = 0.0
    match fault.kind:
        case "drop" | "truncate":
            chunks = chunks[:cut]
        case "error":
            error = {"message": fault.message or "It broke.", "type": "server_error", "param": None}
            error["code"] = fault.type
            last = {"error": error} if is_chat else responses.broken(error, cut)
            chunks = [*chunks[:cut], _encoded(last, is_chat)]
        case "corrupt":
            chunks = [*chunks[:cut], b'data: {"type": "response.output_te\n\n', *chunks[cut:]]
        case "empty":
            chunks = []
        case "slow":
            pause = fault.delay
    return Answer(200, headers, chunks, None, pause, fault.kind != "drop")


def _encoded(event: dict[str, Any], is_chat: bool) -> bytes:
    name = b"" if is_chat else f"event: {event['type']}\n".encode()
    return name + b"data: " + encode_json(event) + b"\n\n"


def _cut(text: str) -> Iterator[str]:
    sizes, start = itertools.cycle(_SIZES), 0
    while start < len(text):
        size = next(sizes)
        yield text[start : start + size]
        start += size
