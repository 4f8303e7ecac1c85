"""Moments as people read them: how long ago, with the exact time beside it."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.translation import gettext as _

EMPTY = "-"


def exact(moment: datetime | None) -> str:
    """Return a moment to the second, with its time zone: what an audit needs."""
    return f"{timezone.localtime(moment):%Y-%m-%d %H:%M:%S %Z}" if moment else EMPTY


def stamp(moment: datetime | None) -> SafeString | str:
    """Return a moment to the second as HTML."""
    return _element(moment, exact(moment)) if moment else EMPTY


def age(moment: datetime | None) -> SafeString | str:
    """Return how long ago a moment was, as HTML that holds the exact time too."""
    return _element(moment, words(moment)) if moment else EMPTY


def dated(moment: datetime | None) -> SafeString | str:
    """Return a moment to the second and how far away it is, as HTML."""
    return _element(moment, f"{exact(moment)} ({ago(moment)})") if moment else EMPTY


def ago(moment: datetime) -> str:
    """Return "3 minutes ago", or "in 3 minutes"."""
    away = words(moment)
    template = _("%(time)s ago") if moment <= timezone.now() else _("in %(time)s")
    return (
        template % {"time": away} if abs(timezone.now() - moment) >= timedelta(seconds=1) else _("just now")
    )


def remaining(moment: datetime | None) -> SafeString | str:
    """Return in how long something expires, or that it has, as HTML with the exact time; "" if never."""
    if moment is None:
        return ""
    left = _("expires in %(time)s") % {"time": words(moment)}
    return _element(moment, _("expired") if moment <= timezone.now() else left)


def is_urgent(asked: datetime, expires: datetime | None) -> bool:
    """Whether less than a fifth of the time to decide is left."""
    return expires is not None and expires - timezone.now() < (expires - asked) / 5


def words(moment: datetime) -> str:
    """Return how far away a moment is, in its largest unit."""
    now = timezone.now()
    seconds = int(abs((now - moment).total_seconds()))
    if seconds < 60:  # timesince knows no seconds
        return f"{seconds}\xa0{_('s')}"
    return str(timesince(moment, now, depth=1) if moment <= now else timeuntil(moment, now, depth=1))


def _element(moment: datetime | None, text: str) -> SafeString:
    iso = moment.isoformat() if moment else ""
    return format_html('<time datetime="{}" title="{}">{}</time>', iso, exact(moment), text)
