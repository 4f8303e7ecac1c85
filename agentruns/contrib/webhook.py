"""Webhooks: set AGENTRUNS_NOTIFIERS = ["agentruns.contrib.webhook.WebhookNotifier"].

They are signed as in Standard Webhooks 1.0.0 (https://www.standardwebhooks.com). The libraries of that
standard verify the signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

import agentruns
from agentruns.conf import SECRET_PREFIX, settings, signing_keys
from agentruns.journal.outbox import Notice, UndeliverableError
from agentruns.utils import clock, http, lanes

TIMEOUT = 5  # seconds for a whole delivery
THREADS = 8  # most deliveries of a process at once, including those that timed out and still hang

_lane = lanes.Lane("agentruns-webhook", THREADS)


class WebhookNotifier:
    """The notifier that posts all events to AGENTRUNS_WEBHOOK_URL. A subclass may select `events`."""

    events: tuple[str, ...] | None = None

    def __call__(self, notice: Notice) -> None:
        """Post the notice once.

        Raises UndeliverableError for status 410, ImproperlyConfigured for an unusable URL or secret, and
        OSError if the delivery fails otherwise.
        """
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
        status, _body = http.post(url, headers, body, lane=_lane, seconds=TIMEOUT)
        if status == 410:
            raise UndeliverableError("The receiver answered 410 Gone.")
        if not 200 <= status < 300:
            raise OSError(f"The receiver answered {status}.")

    def check(self) -> Iterator[CheckMessage]:
        """Yield an Error for an unusable AGENTRUNS_WEBHOOK_URL or AGENTRUNS_WEBHOOK_SECRET."""
        for read, name, hint in (
            (_address, "WEBHOOK_URL", "AGENTRUNS_WEBHOOK_URL = 'https://example.org/hooks/agentruns'"),
            (_keys, "WEBHOOK_SECRET", f"'{SECRET_PREFIX}' and the base64 of 32 random bytes."),
        ):
            try:
                read(getattr(settings, name))
            except ImproperlyConfigured as error:
                yield Error(str(error), hint=hint, id="agentruns.E010")


def sign(secret: str, message_id: str, moment: int, body: bytes) -> str:
    """Build a webhook's signatures by the keys in `secret`, joined by spaces. Raises ImproperlyConfigured."""
    signed = f"{message_id}.{moment}.".encode() + body
    digests = (hmac.digest(key, signed, hashlib.sha256) for key in _keys(secret))
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _keys(secret: Any) -> list[bytes]:
    """Decode a secret's one or more keys. Raises ImproperlyConfigured, with a text that quotes no key."""
    try:
        return signing_keys(secret)
    except ValueError as error:
        raise ImproperlyConfigured(f"AGENTRUNS_WEBHOOK_SECRET {error}.") from None


def _address(url: Any) -> str:
    """Return `url` if it is https://, or http:// on localhost; else raise ImproperlyConfigured."""
    try:
        parts = urlsplit(str(url or ""))
        if not parts.hostname:
            raise ValueError("no host")
    except ValueError:
        raise ImproperlyConfigured("AGENTRUNS_WEBHOOK_URL is not set to a URL.") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in http.LOCAL):
        raise ImproperlyConfigured("AGENTRUNS_WEBHOOK_URL must use https:// (http:// only for localhost).")
    return str(url)
