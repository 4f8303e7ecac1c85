"""AGENTRUNS_API_THROTTLE: how many requests a caller may send. Counted in Django's cache; off by default."""

from __future__ import annotations

import math
import time
from hashlib import sha256
from typing import Any

from django.core.cache import cache
from django.http import HttpRequest
from ninja.conf import settings as ninja_settings
from ninja.throttling import BaseThrottle

from agentruns.api.errors import URN, Problem
from agentruns.conf import settings
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.api.throttling")


class Throttled(Problem):
    """Too many requests; `retry_after` says in how many seconds the next one may come."""

    def __init__(self, limit: int, seconds: int, retry_after: int) -> None:
        detail = f"At most {limit} requests in {seconds} s. Send the next one in {retry_after} s."
        super().__init__(429, URN + "throttled", "Too many requests", detail, retry_after=retry_after)
        self.retry_after = retry_after


def count_user(user: Any) -> None:
    """Count a request of a user, by session or token; raise Throttled if it is one too many."""
    _count("user", str(user.pk))


def count_anonymous(request: HttpRequest) -> None:
    """Count a request without valid credentials by its address; raise Throttled if it is one too many."""
    _count("anonymous", _address(request))


def _count(kind: str, caller: str) -> None:
    rate = settings.api_throttle.get(kind)
    if rate is None:
        return
    limit, seconds = rate
    window, into = divmod(time.time(), seconds)
    key = f"agentruns:throttle:{kind}:{sha256(caller.encode()).hexdigest()[:32]}:{seconds}:{int(window)}"
    if _counted(key, seconds) > limit:
        raise Throttled(limit, seconds, max(1, math.ceil(seconds - into)))


def _counted(key: str, seconds: int) -> int:
    try:
        cache.add(key, 0, timeout=seconds)
        return int(cache.incr(key))
    except ValueError:  # it ran out in between
        return 1
    except Exception:  # whatever a cache's client raises: without a cache nobody is kept out
        logger.warning("The cache failed, so a request was not counted.", exc_info=True)
        return 0


def _address(request: HttpRequest) -> str:
    # What a client writes into X-Forwarded-For is believed only as far as the project says it has proxies.
    if ninja_settings.NUM_PROXIES is None:
        return request.META.get("REMOTE_ADDR") or ""
    return BaseThrottle().get_ident(request) or ""
