"""The protocol of a model: request, reply, and classified errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from agentruns.exceptions import AgentRunsError
from agentruns.signals import text_streamed
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_DEPTH, is_deeper
from agentruns.utils.calls import on_loop

Disposition = Literal["retry", "pause", "fail"]
# Claude's, OpenAI's two APIs' and OpenRouter's: a stored `prompt` may bring tools of its own.
PROVIDER_TOOLS = ("tools", "mcp_servers", "web_search_options", "plugins", "prompt", "functions")
# Codes and types of an error with no status of its own, such as inside a stream.
REFUSING = re.compile(
    r"invalid_(?!reply)\w+|\w*image\w*|\w+_policy\w*|content_filter|context_(length|window)_exceeded"
    r"|request_too_large"
)
LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens")  # of one reply, by its API
UNUSABLE = "The model's reply cannot be used: {why}."
FULL_WINDOW = "model_context_window_exceeded"  # stop reason of a reply that the window's end cut off


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request to a model, in the provider's form.

    `messages`: `[{"role", "content": [blocks]}]`. `tools`: `[{"name", "description", "input_schema"}]`.
    `step`: the number of replies in this run so far, including those that a fork took over from its origin.
    `output_schema`: the JSON Schema that the text of the last reply must fit. `on_text` may be called with
    each piece of the reply's text, or "" for other progress; it raises ProviderError to stop the reply.
    """

    model: str
    system: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    run_id: str = ""
    step: int = 0
    output_schema: dict[str, Any] | None = None
    on_text: Callable[[str], None] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One complete reply. `content` is a list of the provider's blocks as plain dicts, kept verbatim."""

    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    request_id: str = ""


class ProviderError(AgentRunsError):
    """Raised by a model that gives no usable reply. The message must not contain a secret.

    `disposition`: the run retries later ("retry"), is paused for staff ("pause"), or fails ("fail").
    """

    def __init__(
        self,
        message: str = "",
        *,
        disposition: Disposition = "fail",
        type: str = "",  # the provider's name of the error
        code: str = "",
        status: int | None = None,
        retry_after: float | None = None,
        request_id: str = "",
        usage: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.disposition = disposition
        self.type, self.code, self.request_id = _text(type), _text(code), _text(request_id)
        self.status = status if isinstance(status, int) else None
        self.retry_after = retry_after if isinstance(retry_after, int | float) else None
        self.usage = usage
        self.place: tuple[int, int] | None = None  # the message, and the block in it, that the error names

    @property
    def is_refusal(self) -> bool:
        """Check whether the provider refuses the conversation, so that it may accept a shorter one."""
        by_name = self.status is None and (REFUSING.fullmatch(self.type) or REFUSING.fullmatch(self.code))
        return self.disposition == "fail" and (self.status in (400, 413, 422) or bool(by_name))

    @property
    def is_overload(self) -> bool:
        """Check whether the provider is overloaded or limits requests, so that a fallback may succeed."""
        says = f"{self.type} {self.code}"
        by_name = any(word in says for word in ("overloaded", "rate_limit", "slow_down"))
        return self.disposition == "retry" and (self.status in (429, 503, 529) or by_name)


@runtime_checkable
class Model(Protocol):
    """A model: any object with `propose`, which may be a coroutine function."""

    def propose(self, request: ModelRequest) -> ModelReply | Awaitable[ModelReply]:
        """Build the reply to a request; raises ProviderError if there is no usable reply."""
        ...


def send_text(model: Model, request: ModelRequest, text: str) -> None:
    """Pass a piece of the reply's text to the listeners; "" reports other progress to `on_text`."""
    if request.on_text is not None:
        request.on_text(text)
    if text:
        text_streamed.send_robust(type(model), run_id=request.run_id, step=request.step, text=text)


def call_model(model: Model, request: ModelRequest, check: Callable[[], None] = lambda: None) -> ModelReply:
    """Request a reply from a model and check it; raises ProviderError, or whatever the model raises.

    `check` is called regularly while a coroutine runs. If it raises an exception, this cancels the coroutine.
    """
    reply = model.propose(request)
    return check_reply(on_loop(reply, model, check) if inspect.isawaitable(reply) else reply)


def check_reply(reply: object) -> ModelReply:
    """Check that a reply can be journaled and acted on, and return it; raises ProviderError if not.

    A call whose input is nested too deeply passes, because the gate answers that call. A model name or
    request id that is not a string becomes "" and raises nothing, because the reply is paid for. The stop
    reason "end_turn" of a reply with calls becomes "tool_use". A reply that the end of the context window
    cut off passes if it has text and no calls.
    """
    if not isinstance(reply, ModelReply):
        why = f"propose() returned {type(reply).__name__}, not a ModelReply"
        raise ProviderError(UNUSABLE.format(why=why), type="invalid_reply")
    if not isinstance(reply.model, str) or not isinstance(reply.request_id, str):
        reply = replace(reply, model=_text(reply.model), request_id=_text(reply.request_id))
    known: dict[str, Any] = {"usage": reply.usage or None, "request_id": reply.request_id}
    if reply.stop_reason is None:
        text = "The reply was cut off: it has no stop_reason."
        raise ProviderError(text, disposition="retry", type="incomplete_reply", **known)
    if why := _why_unusable(reply):
        raise ProviderError(UNUSABLE.format(why=why), type="invalid_reply", **known)
    has_calls = any(block["type"] == "tool_use" for block in reply.content)
    if has_calls and reply.stop_reason == "end_turn":  # as some gateways say
        reply = replace(reply, stop_reason="tool_use")
    has_text = any(block["type"] == "text" and block["text"].strip() for block in reply.content)
    if reply.stop_reason == FULL_WINDOW and (has_calls or not has_text):  # the next request would be longer
        text, kind = "The conversation no longer fits the model's context window.", "context_window_exceeded"
        raise ProviderError(text, type=kind, usage=reply.usage, request_id=reply.request_id)
    return reply


def _why_unusable(reply: ModelReply) -> str:
    if not isinstance(reply.stop_reason, str):
        return "its stop_reason is not a string"
    if not isinstance(reply.usage, dict):
        return "its usage is not a dict"
    if not isinstance(reply.content, list):
        return "its content is not a list"
    for position, block in enumerate(reply.content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            return f"block {position} of its content is not a dict with a type"
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            return f"the text of block {position} is not a string"
        if block["type"] == "tool_result":
            return f"block {position} is a tool_result, which a model may not send"
    kept = [reply.usage]
    for block in reply.content:  # the gate answers a call whose input is nested too deeply
        is_deep = block["type"] == "tool_use" and is_deeper(block.get("input"), MAX_DEPTH)
        kept.append({**block, "input": None} if is_deep else block)
    if is_deeper(kept, MAX_DEPTH + 2):  # the list and the block around an input
        return f"its content or usage is nested more than {MAX_DEPTH} levels deep"
    return "" if _is_json(kept) else "its content or usage is not JSON"


def usage_of(error: ProviderError) -> dict[str, Any]:
    """Extract the usage of a failed request; {} if there is none, or if it cannot be journaled."""
    usage = error.usage
    fits = isinstance(usage, dict) and not is_deeper(usage, MAX_DEPTH) and _is_json(usage)
    return usage if usage and fits else {}


def token_count(usage: Any, name: str) -> int:
    """Read a count from a usage; 0 if the count is not a positive whole number, or the usage no dict."""
    value = usage.get(name) if isinstance(usage, Mapping) else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def provider_tools(params: dict[str, Any] | None) -> list[str]:
    """List the request parameters that make the provider use tools itself.

    The journal has no row of such a call before its effect. Parameters in `extra_body` count as well.
    """
    params = params or {}
    inner = params.get("extra_body")
    given = {**inner, **params} if isinstance(inner, dict) else params
    return [name for name in PROVIDER_TOOLS if given.get(name)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_json(value: Any) -> bool:
    try:
        canonical.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
