"""The signature is that of Standard Webhooks, and what a webhook may be sent to."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import django
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from agentruns.checks.settings import check_notifiers
from agentruns.contrib.webhook import sign

# What the libraries of the specification test themselves with.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE = ("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

WEBHOOK = "agentruns.contrib.webhook.WebhookNotifier"
MAIL = "agentruns.contrib.mail.MailNotifier"
SIGNED = {"NOTIFIERS": [WEBHOOK], "WEBHOOK_SECRET": SECRET}
TAKEN = ["https://example.org/x", "http://127.0.0.1:8000/x", "http://[::1]:8000/x"]
REFUSED = [
    "http://example.org/x", "http://localhost.example.org/x", "http://user@example.org/127.0.0.1",
    "file:///etc/passwd", "ftp://localhost/x", "https://[::1",
]  # fmt: skip


def test_the_signature_is_the_one_the_specification_publishes_with_each_of_several_secrets() -> None:
    assert sign(SECRET, *MESSAGE) == SIGNATURE
    key = bytes(range(32))
    other = "whsec_" + base64.b64encode(key).decode()
    content = b"msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330." + MESSAGE[2]
    expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    assert sign(f"{other} {SECRET}", *MESSAGE) == f"v1,{expected} {SIGNATURE}"


@pytest.mark.parametrize(
    "secret", ["", None, "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_MfKQ", "whsec_not base64!", "whsec_"]
)
def test_a_secret_that_is_none_is_refused_and_not_quoted(secret: Any) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        sign(secret, *MESSAGE)
    assert "AGENTRUNS_WEBHOOK_SECRET" in str(caught.value)
    assert "MfKQ" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"NOTIFIERS": "agentruns.contrib.mail.MailNotifier"}, ["agentruns.E009"]),
        ({"NOTIFIERS": ["agentruns.contrib.pigeon.Notifier"]}, ["agentruns.E009"]),
        ({"NOTIFIERS": ["agentruns.journal.outbox.MAX_ATTEMPTS"]}, ["agentruns.E009"]),
        ({"NOTIFIERS": [WEBHOOK]}, ["agentruns.E010", "agentruns.E010"]),
        ({"NOTIFIERS": [WEBHOOK], "WEBHOOK_URL": "https://example.org/x"}, ["agentruns.E010"]),
        ({"NOTIFIERS": [WEBHOOK], "WEBHOOK_SECRET": SECRET}, ["agentruns.E010"]),
        *(({**SIGNED, "WEBHOOK_URL": url}, []) for url in TAKEN),
        *(({**SIGNED, "WEBHOOK_URL": url}, ["agentruns.E010"]) for url in REFUSED),
        ({"NOTIFIERS": [MAIL]}, []),
        ({"NOTIFIERS": [MAIL], "NOTIFY_EMAILS": "a@example.org"}, ["agentruns.E011"]),
        ({"NOTIFIERS": [MAIL], "NOTIFY_EMAILS": ["a@example.org"]}, []),
        ({"NOTIFIERS": ["tests.unit.test_webhook.listen"]}, []),
        ({"NOTIFIERS": []}, []),
    ],
)
def test_what_would_keep_notifications_back_is_found(changed: dict[str, Any], expected: list[str]) -> None:
    with override_settings(**{f"AGENTRUNS_{name}": value for name, value in changed.items()}):
        found = check_notifiers(None)
    assert [message.id for message in found] == expected
    assert all(message.hint for message in found)


@pytest.mark.parametrize(("timeout", "expected"), [(None, ["agentruns.W004"]), (5, [])])
def test_a_mail_server_that_could_keep_workers_waiting_is_found(
    timeout: int | None, expected: list[str], settings: Any
) -> None:
    settings.AGENTRUNS_NOTIFIERS = [MAIL]
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    smtp = "django.core.mail.backends.smtp.EmailBackend"
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": smtp, "OPTIONS": {"timeout": timeout}}}
    else:
        settings.EMAIL_BACKEND, settings.EMAIL_TIMEOUT = smtp, timeout
    assert [message.id for message in check_notifiers(None)] == expected


def listen(notice: object) -> None:
    """A notifier that is a function."""
