"""How large a request may be, checked before anything of it is parsed. JSON's depth: see schemas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException

from agentruns.api.errors import URN, Problem
from agentruns.conf import settings

WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
MOST_DIGITS = 18


def limited(run: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a request whose body is larger than AGENTRUNS_API_MAX_BODY, or says of itself what is not so."""

    @wraps(run)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            if request.method not in WITHOUT_BODY:
                _check(request, settings.API_MAX_BODY)
        except (Problem, RawPostDataException) as error:
            operation: Any = inspect.unwrap(run)
            return operation.__self__.api.on_exception(request, error)
        return run(request, *args, **kwargs)

    return checked


def _check(request: HttpRequest, most: int) -> None:
    declared = str(request.META.get("CONTENT_LENGTH") or "0").strip()
    if not (declared.isascii() and declared.isdigit()):
        detail = "Content-Length is not a number of bytes. Send JSON in UTF-8."
        raise Problem(400, URN + "malformed", "The request cannot be read", detail)
    if len(declared) > MOST_DIGITS or int(declared) > most:
        raise _too_large(most)
    try:
        # A body may be longer than it says, or say nothing (chunked); Django reads up to its own limit.
        is_larger = len(request.body) > most
    except RequestDataTooBig:
        is_larger = True
    if is_larger:
        raise _too_large(min(most, django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE or most))


def _too_large(most: int) -> Problem:
    detail = f"The body has more than {most} bytes. Send less, or ask the operator to raise the limit."
    return Problem(413, URN + "too-large", "The request is too large", detail, max_bytes=most)
