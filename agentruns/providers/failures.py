"""Models behind a provider's SDK, and the failures of their requests as classified errors."""

from __future__ import annotations

import email.utils
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from agentruns.providers import schemas
from agentruns.providers.base import REFUSING, Disposition, ModelReply, ModelRequest, ProviderError
from agentruns.utils.forks import keep, without_connections

_CREDENTIALS = ("api_key", "auth_token", "access_token", "aws_secret_key", "aws_session_token")
_SECRET = re.compile(r"\bsk-[\w-]{16,}|sk-ant-[\w-]+|(?<=bearer )\S+", re.IGNORECASE)
_MAX_TEXT = 500
# Codes and types beside a status, or instead inside a stream. Errors that waiting does not cure come first.
_PAUSING = re.compile(
    r"account_deactivated|authentication_error|billing_\w+|data_residency_mismatch|insufficient_quota"
    r"|invalid_api_key|model_not_found|not_found_error|organization_on_hold|permission_error"
    r"|\w*spend_limit_reached"
)
_MISSING = re.compile("authentication method|Missing credentials")  # in the SDKs' error texts
_BROKEN = (OSError, json.JSONDecodeError, UnicodeDecodeError)
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


class Answer:
    """The progress of an answer that may break off: `raw` is the part of it that has arrived so far."""

    begun = is_whole = False
    request_id = ""
    raw: Any = None

    def complete(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Mark the answer as complete, keep its JSON and return it."""
        self.raw, self.is_whole = raw, True
        return raw


class SDKModel:
    """A model behind an SDK, with a client that is given or that the model makes."""

    package: ClassVar[str]
    # A subclass sends the request (`ask`), reads an answer's usage (`usage_in`) and makes a client.
    identity: Any
    ask: Any
    usage_in: Any
    make_client: Any
    _client: Any = None

    def __init__(self, name: str, client: Any, timeout: float | None, streaming: bool) -> None:
        self.name, self.timeout, self.streaming, self._given = name, timeout, streaming, client
        self._pid = os.getpid()  # the process of the client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity!r})"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Request the model's reply; raises a classified ProviderError for any failure."""
        answer, secrets, sent = Answer(), list[str](), request
        try:
            sent, names = schemas.acceptable(request)
            reply: ModelReply = self.ask(sent, answer)
            return schemas.restored(reply, names)
        except Exception as error:
            client = self._client or self._given
            keys = [getattr(client, name, None) for name in _CREDENTIALS]
            secrets += [key for key in keys if isinstance(key, str) and len(key) > 5]
            failure = classify(self.package, error, secrets, begun=answer.begun)
            if answer.is_whole and not isinstance(error, ProviderError):  # asking again costs as much
                text = f"The reply has a form that cannot be read: {type(error).__name__}."
                failure = ProviderError(text, disposition="fail", type="invalid_reply")
        # Raised outside the handler so that it has no __context__: the SDK's errors can quote headers.
        failure.args = (cleaned(str(failure), secrets),)
        failure.place = self.place_in(sent, str(failure)) if failure.is_refusal else None
        failure.usage = failure.usage or self.usage_in(answer.raw) or None
        failure.request_id = failure.request_id or answer.request_id
        raise failure

    def place_in(self, request: ModelRequest, text: str) -> tuple[int, int] | None:
        """Find the message, and the block in it, that an error's text names; None if unknown."""
        return None

    def client(self) -> Any:
        """Find or make this process's client. It follows no redirect, and never retries.

        A retry would occupy a worker. In a forked process, makes another client, or copies the given one
        without its open connections.
        """
        is_forked = self._pid != os.getpid()  # on a shared connection it would read replies to the parent
        if self._client is None or is_forked:
            keep(self._client)
            given = self.make_client() if self._given is None else self._given
            http = getattr(given, "_client", None) if is_forked and self._given is not None else None
            own = {} if http is None else {"http_client": without_connections(http)}
            client = given.with_options(max_retries=0, **own)
            prepare = client._prepare_options

            def prepared(options: Any) -> Any:
                options = prepare(options)
                options.follow_redirects = False  # a redirect could lead the key to another server
                return options

            client._prepare_options = prepared
            self._client = client
            self._pid = os.getpid()
        return self._client

    def arguments(self, body: dict[str, Any], *named: str, seconds: float | None = None) -> dict[str, Any]:
        """Build the arguments for a method of the SDK, with a timeout in `seconds` unless that is None.

        Members of `body` that are not in `named` go into `extra_body`.
        """
        given = {name: body[name] for name in named if name in body}
        rest = {name: value for name, value in body.items() if name not in given}
        if seconds is not None:
            given["timeout"] = import_module(self.package).Timeout(seconds, connect=min(seconds, 5.0))
        return {"model": self.name, **given, "extra_body": rest}


def refuse(params: Iterable[str], reserved: frozenset[str]) -> None:
    """Raise TypeError if `params` has a reserved parameter, which the request sets itself."""
    if names := sorted(reserved.intersection(params)):
        raise TypeError(f"model_params may not contain {', '.join(names)}")


def plain(answer: Any) -> dict[str, Any]:
    """Convert an answer to JSON with all received fields; raises ProviderError if it is no object."""
    to_dict = getattr(answer, "to_dict", None)
    value = to_dict(mode="json", warnings=False) if to_dict is not None else None
    if not isinstance(value, dict):
        raise ProviderError("The answer is no message.", disposition="retry", type="invalid_reply")
    return value


def of_status(status: int) -> Disposition | None:
    """Choose the disposition for an HTTP status; None if the status is below 300."""
    if status in (408, 409, 429) or status >= 500:
        return "retry"
    if status in (401, 402, 403, 404) or 300 <= status < 400:
        return "pause"
    return "fail" if status >= 400 else None


def judged(status: int | None, *words: str) -> Disposition:
    """Choose the disposition of an error by its status and by `words`, which are its code and its type.

    A word that is a number counts as a status. If nothing decides, the disposition is "retry".
    """
    if any(map(_PAUSING.fullmatch, words)):
        return "pause"
    for number in (status or 200, *(int(word) for word in words if word.isdecimal() and len(word) < 7)):
        if disposition := of_status(number):
            return disposition
    return "fail" if any(map(REFUSING.fullmatch, words)) else "retry"


def answered(
    said: Any, secrets: Sequence[str] = (), who: str = "The provider", **known: Any
) -> ProviderError:
    """Build a ProviderError from an error's JSON; `known` has further fields, such as `status`."""
    if isinstance(said, list) and said:  # from Gemini's server
        said = said[0].get("error", said[0]) if isinstance(said[0], dict) else said[0]
    said = said if isinstance(said, dict) else {"message": said}
    status, name = known.get("status"), known.pop("name", "")
    word, kind, details = (said.get(each) or "" for each in ("code", "type", "details"))
    code = str(word or (details.get("error_code") if isinstance(details, dict) else "") or "")
    text = said["message"] if isinstance(said.get("message"), str) else name
    return ProviderError(
        cleaned(f"{who} answered {status or code}: {text}", secrets),
        disposition=judged(status, code, str(kind)),
        type=str(word or kind or name),
        code=code,
        **known,
    )


def classify(
    package: str, error: Exception, secrets: Sequence[str] = (), *, begun: bool = False
) -> ProviderError:
    """Build the ProviderError for an exception of an SDK, without the secrets in its text.

    `begun` means that the answer had begun to arrive. Then an error of an unknown class is one of the
    connection, which may pass.
    """
    if isinstance(error, ProviderError):
        return error
    if isinstance(error, ImportError):
        text = f"The client needs a package that is not installed: {error.name}."
        if error.name == package:
            text = f"The {package} package cannot be imported: pip install 'agentruns[{package}]'."
        return ProviderError(text, disposition="pause", type="not_installed")
    sdk, name = import_module(package), type(error).__name__
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, dict) else body if isinstance(body, list) else None
    if isinstance(error, sdk.APIStatusError):
        who = {"anthropic": "Anthropic"}.get(package, "The provider")
        about = {"request_id": error.request_id or "", "retry_after": retry_after(error.response.headers)}
        if error.response.has_redirect_location:
            to = error.response.headers["location"].partition("?")[0]
            name = "redirect"
            body = f"a redirect to {to} is not followed. Set the base_url to the right server."
        return answered(body, secrets, who, status=error.status_code, name=name, **about)
    if isinstance(error, sdk.APIError) and body is not None:  # an error inside OpenAI's stream
        return answered(body, secrets)
    # By module name: the SDKs may use either HTTP library, and have changed it before.
    is_of_http = any(kind.__module__.startswith(("httpx", "httpcore")) for kind in type(error).__mro__)
    broken = (sdk.APIError, getattr(sdk, "RetryableError", ()), *_BROKEN)
    if is_of_http or isinstance(error, broken):  # the answer did not arrive whole
        cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
        text = cleaned(f"{name}{cause}: {error}", secrets)
        return ProviderError(text, disposition="retry", type=name)
    if not begun and _MISSING.search(str(error)):
        text = f"No credentials: set {package.upper()}_API_KEY, or give the model a client."
        return ProviderError(text, disposition="pause", type="missing_credentials")
    if isinstance(error, RecursionError) or (begun and "recursion limit" in str(error)):
        text = f"The reply is nested too deeply for the SDK to read: {name}."  # asking again costs as much
        return ProviderError(text, disposition="fail", type="invalid_reply")
    # Nothing was sent, or the SDK could not handle its input: a person has to look.
    local = isinstance(error, (sdk.APIError.__base__, *_MISTAKES)) and not begun
    text = cleaned(f"{name}: {error}", secrets)
    return ProviderError(text, disposition="pause" if local else "retry", type=name)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the seconds to wait from `retry-after-ms` or Retry-After; None without a usable value.

    A date in Retry-After is compared with the answer's own date, because this machine's clock may be wrong.
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
    """Put an error's text on one line, mask keys and `secrets`, and cut the text to _MAX_TEXT characters."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(_SECRET.sub("***", text).split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
