"""Checks of AGENTRUNS_* and of the Django settings that durability depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections

from agentruns.agents.prices import mistakes
from agentruns.conf import settings, unknown_names
from agentruns.journal import payloads
from agentruns.journal.outbox import load_notifier
from agentruns.tools.refusals import mistake


@register("agentruns")
def check_settings(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check names and values of AGENTRUNS_*, USE_TZ and DATABASES."""
    found: list[CheckMessage] = [
        Warning(
            f"There is no setting {name}.",
            hint="A mistyped safety setting has no effect; see docs/reference/settings for the names.",
            id="agentruns.W001",
        )
        for name in unknown_names()
    ]
    found += [
        Error(
            f"AGENTRUNS_PRICES cannot be used: {mistake}.",
            hint="{'claude-sonnet-5-5': {'input': 3, 'output': 15}}, for a million tokens.",
            id="agentruns.E007",
        )
        for mistake in mistakes(settings.PRICES)
    ]
    if settings.HEARTBEAT_SECONDS * 2 > settings.LEASE_SECONDS:
        found.append(
            Error(
                "AGENTRUNS_HEARTBEAT_SECONDS leaves no room to miss one beat within AGENTRUNS_LEASE_SECONDS.",
                hint="Make the heartbeat at most half of the lease.",
                id="agentruns.E001",
            )
        )
    if not django_settings.USE_TZ:
        found.append(
            Error(
                "USE_TZ is off, so leases and the journal's times are ambiguous when clocks change.",
                hint="Set USE_TZ = True; see Django's guide 'Time zones'.",
                id="agentruns.E002",
            )
        )
    if settings.DATABASE not in connections:
        found.append(
            Error(
                f"AGENTRUNS_DATABASE names {settings.DATABASE!r}, which is not in DATABASES.",
                hint="Use one of DATABASES' aliases.",
                id="agentruns.E003",
            )
        )
    return found


@register("agentruns")
def check_notifiers(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check that the notifiers of AGENTRUNS_NOTIFIERS can be loaded, and run their own checks."""
    found: list[CheckMessage] = []
    paths = settings.NOTIFIERS
    hint = "AGENTRUNS_NOTIFIERS = ['agentruns.contrib.mail.MailNotifier'], a list of dotted paths."
    if not isinstance(paths, list | tuple):
        return [Error("AGENTRUNS_NOTIFIERS is not a list.", hint=hint, id="agentruns.E009")]
    for path in paths:
        try:
            notifier = load_notifier(path)
        except Exception as error:  # a module may raise anything while it is imported
            text = f"AGENTRUNS_NOTIFIERS names {path!r}, which cannot be used: {error}"
            found.append(Error(text, hint=hint, id="agentruns.E009"))
            continue
        found += getattr(notifier, "check", list)()
    return found


@register("agentruns")
def check_throttle(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check the form of AGENTRUNS_API_THROTTLE."""
    try:
        settings.api_throttle  # noqa: B018 - raises
    except ValueError as error:
        hint = "AGENTRUNS_API_THROTTLE = {'user': '100/m', 'anonymous': '10/m'}; per s, m, h or d."
        return [Error(f"AGENTRUNS_API_THROTTLE cannot be used: {error}.", hint=hint, id="agentruns.E013")]
    return []


@register("agentruns")
def check_refusals(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check that AGENTRUNS_REFUSALS names exceptions, or functions of one."""
    try:
        wrong = next(filter(None, map(mistake, settings.refusals)), "")
    except Exception as error:  # a module may raise anything while it is imported
        wrong = str(error)
    if not wrong:
        return []
    hint = "AGENTRUNS_REFUSALS = ['shop.payments.CardDeclined', 'agentruns.http_refusal'], dotted paths."
    return [Error(f"AGENTRUNS_REFUSALS cannot be used: {wrong}.", hint=hint, id="agentruns.E017")]


@register("agentruns")
def check_payloads(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check that AGENTRUNS_PAYLOAD_INLINE_MAX is a number of bytes."""
    limit = settings.PAYLOAD_INLINE_MAX
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        return []
    text = f"AGENTRUNS_PAYLOAD_INLINE_MAX is {limit!r}, not a number of bytes."
    return [Error(text, hint="AGENTRUNS_PAYLOAD_INLINE_MAX = 65_536", id="agentruns.E012")]


@register("agentruns", deploy=True)
def check_payload_storage(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    """Check, before a deployment, that large results have a storage outside the database."""
    name = settings.PAYLOAD_STORAGE
    if not name or payloads.is_configured():
        return []
    return [
        Warning(
            f"STORAGES has no {name!r}, so tool results of any size are stored in the database.",
            hint=f"STORAGES = {{..., {name!r}: {{'BACKEND': 'django.core.files.storage.FileSystemStorage', "
            "'OPTIONS': {'location': '/a/private/folder'}}}; or, if they are to stay in the database, "
            "AGENTRUNS_PAYLOAD_STORAGE = ''.",
            id="agentruns.W005",
        )
    ]
