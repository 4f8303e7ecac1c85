"""Claude models through the Anthropic SDK, which is imported at the first request: it costs seconds."""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from agentruns import canonical
from agentruns.providers.base import Disposition, ModelReply, ModelRequest, ProviderError, check_reply

DEFAULT_MAX_TOKENS = 8192
# The SDK refuses a longer reply without streaming, unless a time-out is given.
_MAX_TOKENS_IN_TEN_MINUTES = 21_333
_SECONDS_PER_TOKEN = 3600 / 128_000
_RESERVED = frozenset({"model", "system", "messages", "tools", "stream", "timeout"})
_SECRET = re.compile(r"sk-ant-[\w-]+|(?<=bearer )\S+", re.IGNORECASE)
_MAX_TEXT = 500
_BY_TYPE: dict[str, Disposition] = {
    "authentication_error": "pause",
    "billing_error": "pause",
    "permission_error": "pause",
    "not_found_error": "pause",
    "invalid_request_error": "fail",
    "request_too_large": "fail",
}


class AnthropicModel:
    """A Claude model by name, over the Messages API without streaming.

    `client`: an `anthropic.Anthropic` of your own (key, proxy, base_url); its retries are switched off,
    because the run's own back-off waits without holding a worker. `timeout` in seconds.
    """

    def __init__(self, name: str, client: Any = None, *, timeout: float | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self._given = client
        self._client: Any = None

    @property
    def identity(self) -> str:
        """The model's name: the same model with another client is the same definition."""
        return self.name

    def __repr__(self) -> str:
        return f"AnthropicModel({self.name!r})"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Return the model's reply; raises ProviderError, classified, for whatever goes wrong."""
        try:
            return _reply(self._send(request))
        except Exception as error:
            failure = classify(error, self._secrets())
        # Raised out here so that it has no __context__: the SDK's errors can quote the request's headers.
        raise failure

    def _send(self, request: ModelRequest) -> Any:
        reserved = sorted(_RESERVED & request.params.keys())
        if reserved:
            raise TypeError(f"model_params may not contain {', '.join(reserved)}")
        body = {"max_tokens": DEFAULT_MAX_TOKENS, **request.params, "messages": request.messages}
        if request.system:
            body["system"] = request.system
        if request.tools:
            body["tools"] = request.tools
        timeout = self._timeout(body["max_tokens"])
        return self._ready().messages.create(model=self.name, **canonical.legal(body), **timeout)

    def _timeout(self, max_tokens: int) -> dict[str, Any]:
        if self.timeout is None and max_tokens <= _MAX_TOKENS_IN_TEN_MINUTES:
            return {}
        import anthropic

        seconds = self.timeout if self.timeout is not None else max_tokens * _SECONDS_PER_TOKEN
        return {"timeout": anthropic.Timeout(seconds, connect=min(seconds, 5.0))}

    def _ready(self) -> Any:
        if self._client is None:
            import anthropic

            client = anthropic.Anthropic() if self._given is None else self._given
            self._client = client.with_options(max_retries=0)
        return self._client

    def _secrets(self) -> list[str]:
        client = self._client or self._given
        found = [getattr(client, name, None) for name in ("api_key", "auth_token")]
        return [secret for secret in found if isinstance(secret, str) and len(secret) > 5]


def classify(error: Exception, secrets: list[str] | None = None) -> ProviderError:
    """Return the ProviderError for anything the SDK raised, without the secrets in its text."""
    if isinstance(error, ProviderError):
        return error
    if isinstance(error, ImportError):
        text = "The anthropic package cannot be imported: pip install 'agentruns[anthropic]'."
        return ProviderError(text, disposition="pause", type="not_installed")
    import anthropic

    if isinstance(error, anthropic.APIStatusError):
        return _status_error(error, secrets or [])
    name = type(error).__name__
    if isinstance(error, anthropic.APIError | anthropic.RetryableError) or _is_transport(error):
        cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
        text = _clean(f"{name}{cause}: {error}", secrets or [])
        return ProviderError(text, disposition="retry", type=name)
    if isinstance(error, TypeError) and "authentication method" in str(error):
        text = "No credentials for Anthropic: set ANTHROPIC_API_KEY, or give AnthropicModel a client."
        return ProviderError(text, disposition="pause", type="missing_credentials")
    # Nothing was sent, or the SDK could not make sense of what it was given: a person has to look.
    local = isinstance(error, anthropic.AnthropicError | TypeError | ValueError)
    text = _clean(f"{name}: {error}", secrets or [])
    return ProviderError(text, disposition="pause" if local else "retry", type=name)


def _status_error(error: Any, secrets: list[str]) -> ProviderError:
    status, kind = error.status_code, error.type if isinstance(error.type, str) else ""
    detail = error.api_message if isinstance(error.api_message, str) else error.response.reason_phrase
    return ProviderError(
        _clean(f"Anthropic answered {status}: {detail}", secrets),
        disposition=_disposition(status, kind),
        type=kind or type(error).__name__,
        code=error.error_code or "",
        status=status,
        retry_after=retry_after(error.response.headers),
        request_id=error.request_id or "",
    )


def _disposition(status: int, kind: str) -> Disposition:
    if status in (408, 409, 429) or status >= 500:
        return "retry"
    if status in (401, 402, 403, 404):
        return "pause"
    if status >= 400:
        return "fail"
    # An error event inside a stream that began with 200.
    return _BY_TYPE.get(kind, "retry")


def _is_transport(error: Exception) -> bool:
    # By module name: which HTTP library is below is the SDK's business, and has changed before.
    libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(libraries & {"httpx2", "httpcore2", "httpx", "httpcore"}) or isinstance(
        error, OSError | json.JSONDecodeError
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a response asks to wait: `retry-after-ms`, or Retry-After as seconds or a date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
        return max(0.0, date.timestamp() - time.time())
    except (KeyError, ValueError, OverflowError):
        return None


def _reply(message: Any) -> ModelReply:
    to_dict = getattr(message, "to_dict", None)
    data = to_dict(mode="json", warnings=False) if to_dict is not None else None
    if not isinstance(data, dict) or not isinstance(data.get("content"), list):
        raise ProviderError("The answer is not a message.", disposition="retry", type="invalid_reply")
    return check_reply(
        ModelReply(
            content=data["content"],
            stop_reason=data.get("stop_reason"),
            usage=data.get("usage") or {},
            model=str(data.get("model") or ""),
            request_id=getattr(message, "_request_id", None) or "",
        )
    )


def _clean(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(_SECRET.sub("***", text).split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
