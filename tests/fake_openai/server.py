"""The fake itself: what is answered to which request, and what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.fake_anthropic.fake import Fake, Script
from tests.fake_anthropic.faults import Fault, Refused
from tests.fake_anthropic.http import Answer, encode_json, pieces, plain, streamed
from tests.fake_openai import chat, responses

if TYPE_CHECKING:
    from openai import OpenAI

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
_ERRORS: dict[int, tuple[str, str | None]] = {  # type, code
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "unsupported_country_region_territory"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
    500: ("server_error", None),
    503: ("service_unavailable_error", "server_is_overloaded"),
}


class FakeOpenAI(Fake):
    """Both APIs of OpenAI, and servers that speak them.

    In raw content `{"type": "reasoning"}` and `{"type": "refusal", "refusal": ...}` are as OpenAI has them.
    The `type` of a fault is a code of OpenAI's. `models`: the names it knows, or all.
    """

    request_id_header = "x-request-id"

    def __init__(
        self,
        script: Script = (),
        *,
        api_key: str = "sk-fake-0123456789abcdef",
        models: Iterable[str] = (),
        takes_files: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(script, api_key=api_key, **options)
        self.models, self.takes_files = [*models], takes_files
        self.encrypted: set[str] = set()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def client(self, kind: str = "OpenAI", **options: Any) -> OpenAI:
        """Make a client of the real SDK."""
        import openai

        client: OpenAI = self.make_client(openai, kind, **options)
        return client

    def refusal(self, fault: Fault) -> Refused:
        status = fault.kind if isinstance(fault.kind, int) else 500
        type, code = _ERRORS.get(status, ("", None))
        text, code = fault.message or "Something is wrong.", fault.error_code or code
        return Refused(text, status, type=type, code=code, headers=fault.headers)

    def error_body(self, refused: Refused, request_id: str) -> dict[str, Any]:
        error = {"message": refused.message, "type": refused.type or "invalid_request_error"}
        return {"error": {**error, "param": None, "code": refused.code}}

    def answer(
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
            raise Refused(f"The model `{body.get('model')}` does not exist.", 404, code="model_not_found")
        api: Any = chat if is_chat else responses
        given = self.takes_files if is_chat else self.encrypted
        api.check(body, given)
        self.check_content(body, "messages" if is_chat else "input")
        size = len(encode_json(body)) // 4
        if size > self.window:
            text = f"Your input exceeds the context window of this model: {size} tokens."
            raise Refused(text, code="context_length_exceeded")
        content, stop, usage = self.turn(body, api.replies(body))
        used = api.usage(usage.get("sent", size), usage.get("cached", 0), usage.get("written", 7))
        whole = api.answer(body, content, stop, used, self.encrypted)
        if body.get("stream"):
            return _streamed(self.bend([*api.events(whole, pieces, body)]), fault, named, is_chat)
        if fault and fault.kind == "error":
            raise self.refusal(fault)
        return plain(200, whole, fault, named)


def _streamed(
    events: list[dict[str, Any]], fault: Fault | None, named: dict[str, str], is_chat: bool
) -> Answer:
    chunks = [_encoded(event, is_chat) for event in events] + ([b"data: [DONE]\n\n"] if is_chat else [])
    cut = min(3 if fault is None or fault.after is None else fault.after, len(events) - 1)
    error = b""
    if fault:
        told = {"code": fault.type, "message": fault.message or "It broke.", "param": None}
        if is_chat:
            error = _encoded({"error": {**told, "type": "server_error"}}, is_chat)
        else:
            error = _encoded({"type": "error", **told, "sequence_number": cut}, is_chat)
    corrupt = b'data: {"type": "response.output_te\n\n'
    return streamed(chunks, cut, fault, named, error=error, corrupt=corrupt)


def _encoded(event: dict[str, Any], is_chat: bool) -> bytes:
    name = b"" if is_chat else f"event: {event['type']}\n".encode()
    return name + b"data: " + encode_json(event) + b"\n\n"
