"""Models behind a provider's SDK, and the failures of asking them, as classified errors."""

from __future__ import annotations

import email.utils
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentruns.providers.base import Disposition, ModelReply, ModelRequest, ProviderError, model_identity

_CREDENTIALS = ("api_key", "auth_token", "access_token", "aws_secret_key", "aws_session_token")
_SECRET = re.compile(r"\bsk-[\w-]{16,}|sk-ant-[\w-]+|(?<=bearer )\S+", re.IGNORECASE)
_MAX_TEXT = 500
# Codes that OpenAI, and servers that speak like it, give beside a status, or in its place inside a stream.
_PAUSING_CODES = frozenset({
    "account_deactivated", "billing_hard_limit_reached", "billing_not_active", "data_residency_mismatch",
    "insufficient_quota", "invalid_api_key", "model_not_found",
})  # fmt: skip
_FAILING_CODES = re.compile(r"invalid_\w+|\w*image\w*|\w+_policy\w*|content_filter|context_length_exceeded")
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


class Answer:
    """Progress of an answer, for when it breaks off: `raw` is what has arrived."""

    begun = False
    request_id = ""
    raw: Any = None


class SDKModel:
    """A model that is asked through an SDK, with a client of its own or one that it is given."""

    name: str
    timeout: float | None
    _given: Any
    _client: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({model_identity(self)!r})"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Return the model's reply; raises a classified ProviderError for any failure."""
        answer, secrets = Answer(), list[str]()
        try:
            return self._ask(request, answer)
        except Exception as error:
            client = self._client or self._given
            found = [getattr(client, name, None) for name in _CREDENTIALS]
            secrets += [secret for secret in found if isinstance(secret, str) and len(secret) > 5]
            failure = self._classified(error, secrets, answer.begun)
        # Raised outside the handler so that it has no __context__: the SDK's errors can quote headers.
        failure.args = (cleaned(str(failure), secrets),)
        failure.usage = failure.usage or self._used(answer.raw) or None
        failure.request_id = failure.request_id or answer.request_id
        raise failure

    def _ask(self, request: ModelRequest, answer: Answer) -> ModelReply:
        raise NotImplementedError

    def _classified(self, error: Exception, secrets: list[str], begun: bool) -> ProviderError:
        raise NotImplementedError

    def _used(self, raw: Any) -> dict[str, Any]:
        raise NotImplementedError


def plain(answer: Any) -> dict[str, Any]:
    """Return an answer as received, with fields the SDK does not know and without those it adds."""
    to_dict = getattr(answer, "to_dict", None)
    found = to_dict(mode="json", warnings=False) if to_dict is not None else None
    if not isinstance(found, dict):
        raise ProviderError("The answer is no message.", disposition="retry", type="invalid_reply")
    return found


def of_status(status: int) -> Disposition | None:
    """Return what a status asks for, or None if it is no error: one inside a stream that began with 200."""
    if status in (408, 409, 429) or status >= 500:
        return "retry"
    if status in (401, 402, 403, 404):
        return "pause"
    return "fail" if status >= 400 else None


def of_code(code: str, status: int = 200) -> Disposition:
    """Return what an error of OpenAI's asks for; a code may be the status of the server behind a router."""
    if code in _PAUSING_CODES:
        return "pause"
    judged = of_status(status) or (of_status(int(code)) if code.isdecimal() else None)
    return judged or ("fail" if _FAILING_CODES.fullmatch(code) else "retry")


def of_openai(
    error: Mapping[str, Any], secrets: Sequence[str] = (), *, reason: str = "", **known: Any
) -> ProviderError:
    """Return the ProviderError for an error's JSON; `known` is what the answer says beside it."""
    code, status = str(error.get("code") or ""), known.get("status") or 200
    text = error.get("message") if isinstance(error.get("message"), str) else reason
    return ProviderError(
        cleaned(f"The provider answered {code if status == 200 else status}: {text}", secrets),
        disposition=of_code(code, status),
        type=code or str(error.get("type") or ""),
        code=code,
        **known,
    )


def of_exception(
    error: Exception, secrets: Sequence[str], *, begun: bool, package: str, own: type[Exception]
) -> ProviderError:
    """Return the ProviderError for what is no answer: a local mistake, or a broken connection.

    `own`: the base of the package's errors. `begun`: the answer had begun to arrive, so any failure is the
    connection's, whatever its class.
    """
    if isinstance(error, ProviderError):
        return error
    if isinstance(error, ImportError):
        text = f"The client needs a package that is not installed: {error.name}."
        if error.name == package:
            text = f"The {package} package cannot be imported: pip install 'agentruns[{package}]'."
        return ProviderError(text, disposition="pause", type="not_installed")
    name = type(error).__name__
    if is_transport(error):
        return unreached(error, secrets)
    if isinstance(error, RecursionError) or (begun and "recursion limit" in str(error)):
        text = f"The reply is nested too deeply for the SDK to read: {name}."  # asking again costs as much
        return ProviderError(text, disposition="fail", type="invalid_reply")
    # Nothing was sent, or the SDK could not handle its input: a person has to look.
    local = isinstance(error, (own, *_MISTAKES)) and not begun
    text = cleaned(f"{name}: {error}", secrets)
    return ProviderError(text, disposition="pause" if local else "retry", type=name)


def unreached(error: Exception, secrets: Sequence[str]) -> ProviderError:
    """Return the ProviderError for an answer that did not arrive whole."""
    name = type(error).__name__
    cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
    return ProviderError(cleaned(f"{name}{cause}: {error}", secrets), disposition="retry", type=name)


def is_transport(error: Exception) -> bool:
    """Return whether an exception comes from the connection, or from an answer that is no JSON."""
    # By module name: the SDKs may use either HTTP library, and have changed it before.
    libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(libraries & {"httpx2", "httpcore2", "httpx", "httpcore"}) or isinstance(
        error, OSError | json.JSONDecodeError | UnicodeDecodeError
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait according to `retry-after-ms`, or Retry-After as seconds or a date.

    A date is measured from the answer's own, because this machine's clock may be slow or fast.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    try:
        until, sent = (email.utils.parsedate_to_datetime(headers[name]) for name in ("retry-after", "date"))
        return max(0.0, (until - sent).total_seconds())
    except (KeyError, ValueError, OverflowError, TypeError):
        return None


def cleaned(text: str, secrets: Sequence[str]) -> str:
    """Return the text of an error in one line, without keys."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(_SECRET.sub("***", text).split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
