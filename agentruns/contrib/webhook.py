"""Notifications as signed webhooks: AGENTRUNS_NOTIFIERS = ["agentruns.contrib.webhook.WebhookNotifier"].

Signed by Standard Webhooks 1.0.0 (https://www.standardwebhooks.com); any of its libraries verifies them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

import agentruns
from agentruns.conf import settings
from agentruns.journal.outbox import Notice, UndeliverableError
from agentruns.utils import clock

TIMEOUT = 5  # seconds of silence
GONE = 410
PREFIX = "whsec_"
SHORTEST = 24  # bytes; the specification asks for at least 192 bits
LOCAL = ("localhost", "127.0.0.1", "::1")


class WebhookNotifier:
    """Posts every event to AGENTRUNS_WEBHOOK_URL; a subclass with `events` posts only those."""

    events: tuple[str, ...] | None = None

    def __call__(self, notice: Notice) -> None:
        """Post once. Raises OSError unless the answer is 2xx, UndeliverableError for 410."""
        url, secret = _address(settings.WEBHOOK_URL), settings.WEBHOOK_SECRET
        body = json.dumps(notice.payload(), separators=(",", ":")).encode()
        moment = int(clock.now(settings.DATABASE).timestamp())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"agentruns/{agentruns.__version__}",
            "webhook-id": str(notice.id),
            "webhook-timestamp": str(moment),
            "webhook-signature": sign(secret, str(notice.id), moment, body),
        }
        request = Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - see `_address`
        try:
            with _opener(url).open(request, timeout=TIMEOUT):
                pass  # only the status counts
        except HTTPError as error:
            with error:
                if error.code == GONE:
                    raise UndeliverableError("The receiver answered 410 Gone.") from None
                raise OSError(f"The receiver answered {error.code}.") from None

    def check(self) -> list[CheckMessage]:
        """Find settings with which no webhook can be sent."""
        found: list[CheckMessage] = []
        for read, name, hint in (
            (_address, "WEBHOOK_URL", "AGENTRUNS_WEBHOOK_URL = 'https://example.org/hooks/agentruns'"),
            (_keys, "WEBHOOK_SECRET", f"'{PREFIX}' and the base64 of 32 random bytes, from the environment."),
        ):
            try:
                read(getattr(settings, name))
            except ImproperlyConfigured as error:
                found.append(Error(str(error), hint=hint, id="agentruns.E010"))
        return found


def sign(secret: str, message_id: str, moment: int, body: bytes) -> str:
    """Return the signatures of a webhook, one for each key in `secret`, separated by spaces."""
    signed = f"{message_id}.{moment}.".encode() + body
    digests = (hmac.digest(key, signed, hashlib.sha256) for key in _keys(secret))
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _keys(secret: Any) -> list[bytes]:
    """Return the keys of the setting, which may hold several for rotation; errors never quote one."""
    keys = []
    for part in str(secret or "").split():
        try:
            if not part.startswith(PREFIX):
                raise ValueError("no prefix")
            keys.append(base64.b64decode(part.removeprefix(PREFIX), validate=True))
        except (ValueError, binascii.Error):
            text = f"AGENTRUNS_WEBHOOK_SECRET must be '{PREFIX}' followed by base64."
            raise ImproperlyConfigured(text) from None
    if not keys:
        raise ImproperlyConfigured("AGENTRUNS_WEBHOOK_SECRET is not set.")
    if any(len(key) < SHORTEST for key in keys):
        raise ImproperlyConfigured(f"AGENTRUNS_WEBHOOK_SECRET is shorter than {SHORTEST} bytes.")
    return keys


def _address(url: Any) -> str:
    """Return the address if it is allowed: https://, or http:// on localhost."""
    try:
        parts = urlsplit(str(url or ""))
        if not parts.hostname:
            raise ValueError("no host")
    except ValueError:
        raise ImproperlyConfigured("AGENTRUNS_WEBHOOK_URL is not set to a URL.") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL):
        raise ImproperlyConfigured("AGENTRUNS_WEBHOOK_URL must use https:// (http:// only for localhost).")
    return str(url)


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: a signed message goes to its own address only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _opener(url: str) -> OpenerDirector:
    # The environment's proxy is not for localhost.
    direct = [ProxyHandler({})] if urlsplit(url).hostname in LOCAL else []
    return build_opener(_NoRedirects, *direct)
