"""Texts, times and statuses as HTML.

Every text of a model, a tool or a caller goes through `visible`, which escapes it, or through `plain`, whose
result the template escapes. Both show each character that hides or reorders others, and isolate the text: a
name written from right to left moves nothing beside it. Format each value of a sentence by itself, never the
whole sentence. Both apply AGENTRUNS_REDACT to the whole text; a text is cut afterwards, never before.
"""

from __future__ import annotations

import json
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.models import Approval, ApprovalRule, Run
from agentruns.tools.card import one_line
from agentruns.utils import clock
from agentruns.utils.characters import END, FIRST_STRONG, MANY, isolated, pieces, turns
from agentruns.utils.redaction import redact, redacted

EMPTY = "-"
ONE_LINE = 80  # characters
LINE = 200
MOST_CENTS = 10**15  # a larger number is no amount
MARKS = 200  # hidden characters named on a page; a text with more is cut after them
_HANDLER = re.compile(r"\b(the|its) handler\b", re.IGNORECASE)


def person(name: str) -> SafeString:
    """Format a person's name as HTML; "the program" if the name is empty."""
    return visible(name or _("the program"))


def visible(text: object, limit: int | None = None) -> SafeString:
    """Format `text` as HTML: redacted, escaped, isolated, with marks that name hidden characters.

    A text longer than `limit`, or with more than MARKS hidden characters, is cut, with a note.
    """
    part = body("", text, limit)
    more = _("and %(count)d characters more") % {"count": part.left_out}
    return format_html("{} … ({})", part.inline, more) if part.left_out else part.inline


def marked_parts(text: str, limit: int | None = None) -> tuple[list[str], int]:
    """Split a text at its hidden characters, which become HTML marks; count the characters left out.

    The other parts are not escaped yet. A text is cut at `limit` characters, and after MARKS marks.
    """
    parts: list[str] = []
    place = 0
    for number, (piece, hidden, count) in enumerate(pieces(text[:limit])):
        parts.append(piece)
        place += len(piece)
        if not hidden or number == MARKS:
            break
        many = f" ({count})" if count >= MANY else ""
        name = unicodedata.name(hidden, _("a character that is not shown"))
        code = f"U+{ord(hidden):04X}{many}"
        mark = format_html('<span class="ar-char" title="{}">{}</span>', name, code)
        parts += [mark] * (1 if many else count)
        place += count
    return parts, len(text) - place


def plain(text: object) -> str:
    """Format `text` as `bare` does, and isolate its direction from the text beside it; not HTML-escaped."""
    return isolated(bare(text))


def plain_line(text: object, limit: int = LINE) -> str:
    """Format `text` as `plain` does, on one line of at most `limit` characters."""
    return isolated(one_line(bare(text), limit))


def cut(sentence: str, limit: int = LINE) -> str:
    """Cut a sentence to one line of at most `limit` characters. Format its values by `plain` first."""
    sentence = " ".join(sentence.split())
    if len(sentence) <= limit:
        return sentence
    kept = sentence[: limit - 1]
    return f"{kept}…{END * (kept.count(FIRST_STRONG) - kept.count(END))}"


def bare(text: object) -> str:
    """Redact `text` and write hidden characters as [U+202E]: for files, forms and comparisons."""
    parts: list[str] = []
    for piece, hidden, count in pieces(redact(str(text)).replace("\r\n", "\n")):
        code = f"U+{ord(hidden):04X}" if hidden else ""
        mark = f"[{code}]" * count if count < MANY else f"[{code} ({count} times)]"
        parts += (piece, mark if hidden else "")
    return "".join(parts)


def reason(error: str) -> str:
    """Move an error's type, if any, behind its text: "KeyError: no order" becomes "no order (KeyError)"."""
    kind, _colon, text = error.partition(": ")
    return f"{text} ({kind})" if kind.isidentifier() and text.strip() else error


def evidence(text: str) -> str:
    """Format the engine's evidence about a call in doubt for people, with "tool" in place of "handler"."""
    return plain(_HANDLER.sub(r"\1 tool", text, count=1))


def pretty(value: Any) -> str:
    """Format a JSON value for people, redacted, on one line if it fits."""
    value = redacted(value)  # before JSON escapes characters of the texts
    short = json.dumps(value, ensure_ascii=False, default=str)
    return short if len(short) <= ONE_LINE else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def as_text(value: Any) -> str:
    """Return a text unchanged; format any other JSON value as JSON. The result is not escaped for a page."""
    return value if isinstance(value, str) else pretty(value)


def named(name: str, value: Any) -> tuple[str, str]:
    """Format a JSON member for people, as (name, value): `total_cents` 4990 is "total" 49.90; not escaped."""
    words, cents = name.replace("_", " "), redacted(value)
    is_amount = isinstance(cents, int) and not isinstance(cents, bool) and abs(cents) < MOST_CENTS
    if words.split()[-1:] != ["cents"] or not is_amount:
        return words, spoken(value)
    amount = number_format(Decimal(cents) / 100, 2, force_grouping=True)
    return words.removesuffix("cents").strip() or _("amount"), amount


def members(value: Any) -> str:
    """Format a JSON value as "status = paid, total = 20.00"; "" for None. It is not escaped for a page."""
    if not isinstance(value, dict):
        return "" if value is None else spoken(value)
    return ", ".join(" = ".join(named(name, each)) for name, each in redacted(value).items())


def spoken(value: Any) -> str:
    """Format a JSON value without brackets and quotes. The result is not escaped for a page."""
    if isinstance(value, dict):
        return ", ".join(" ".join(named(str(name), each)) for name, each in redacted(value).items())
    if isinstance(value, list):
        return ";\n".join(map(spoken, value))
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    return EMPTY if value is None else as_text(value)


def short_id(value: object) -> str:
    """Cut an id to its first 13 characters, by which the search finds it.

    In a UUID version 7 these are the time.
    """
    return str(value)[:13]


def two_lines(first: object, second: object) -> SafeString:
    """Build a list's cell of a main line and, unless it is empty, a second line below."""
    if not second:
        return format_html("{}", first)
    return format_html('{}<br><span class="ar-second">{}</span>', first, second)


@dataclass(frozen=True, slots=True)
class Body:
    """A labelled text of any length; `left_out` counts the characters that `text` does not show."""

    label: str
    text: SafeString  # for an element of its own
    left_out: int = 0
    kind: str = ""

    @property
    def inline(self) -> SafeString:
        """Isolate the text if it could reorder other texts beside it on its line."""
        return format_html("<bdi>{}</bdi>", self.text) if turns(self.text) else self.text


def body(label: str, text: object, limit: int | None = None, kind: str = "") -> Body:
    """Redact and format a text for a page, cut at `limit` characters and after MARKS marks.

    A page that shows a cut text must offer the full text elsewhere.
    """
    parts, left_out = marked_parts(redact(str(text)).replace("\r\n", "\n"), limit)
    return Body(plain(label), format_html_join("", "{}", ((part,) for part in parts)), left_out, kind)


def arguments(values: dict[str, Any]) -> list[Body]:
    """Format the arguments of a call, each with its name and type and in full."""
    kinds = {type(None): _("nothing"), bool: _("yes or no"), int: _("number"), float: _("number")}
    kinds |= {str: _("text"), list: _("list")}
    bodies = []
    for name, value in values.items():
        kind = _("empty text") if value == "" else kinds.get(type(value), _("object"))
        bodies.append(body(name, as_text(value), kind=kind))
    return bodies


def exact(moment: datetime | None) -> str:
    """Format a time to the second, with its time zone, as audits need it; "-" if there is no time."""
    if moment is None:
        return EMPTY
    with suppress(OverflowError):  # the last hours of the calendar have no other zone
        moment = timezone.localtime(moment)
    return f"{moment:%Y-%m-%d %H:%M:%S %Z}"


def stamp(moment: datetime | None) -> SafeString | str:
    """Format a time to the second as HTML; "-" if there is no time."""
    return timed(moment, exact(moment)) if moment else EMPTY


def age(moment: datetime | None) -> SafeString | str:
    """Format the time between a moment and now as HTML with the exact time; "-" if there is no moment."""
    return timed(moment, words(moment)) if moment else EMPTY


def dated(moment: datetime | None) -> SafeString | str:
    """Format a time to the second, and its distance from now, as HTML; "-" if there is no time."""
    return timed(moment, f"{exact(moment)} ({ago(moment)})") if moment else EMPTY


def ago(moment: datetime | None) -> str:
    """Format a time as "3 minutes ago", "in 3 minutes" or "just now"; "" if there is no time."""
    if moment is None:
        return ""
    now = clock.now(settings.DATABASE)
    if abs(now - moment) < timedelta(seconds=1):
        return _("just now")
    template = _("%(time)s ago") if moment <= now else _("in %(time)s")
    return template % {"time": words(moment)}


def remaining(moment: datetime | None) -> SafeString | str:
    """Format the time until an expiry, or "expired", as HTML with the exact time; "" without expiry."""
    if moment is None:
        return ""
    left = _("expires in %(time)s") % {"time": words(moment)}
    return timed(moment, _("expired") if moment <= clock.now(settings.DATABASE) else left)


def words(moment: datetime) -> str:
    """Format the time between now and a moment in its largest unit, such as "3 minutes"."""
    now = clock.now(settings.DATABASE)
    seconds = int(abs((now - moment).total_seconds()))
    if seconds < 60:  # timesince knows no seconds
        return f"{seconds}\xa0{_('s')}"
    return str(timesince(min(moment, now), max(moment, now), depth=1))


def duration(length: timedelta) -> str:
    """Format a length of time in its two largest units, such as "1 h 5 min"; below a minute, as "1.5 s"."""
    if timedelta() < length < timedelta(seconds=1):
        return _("%(count)d ms") % {"count": round(length / timedelta(milliseconds=1))}
    if length < timedelta(minutes=1):
        return f"{length.total_seconds():.1f}".removesuffix(".0") + f"\xa0{_('s')}"
    minutes, seconds = divmod(int(length.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, _("d")), (hours, _("h")), (minutes, _("min")), (seconds, _("s"))]
    return " ".join([f"{amount}\xa0{unit}" for amount, unit in parts if amount][:2])


def timed(moment: datetime, text: str) -> SafeString:
    """Format a text about a time as HTML, with the exact time."""
    return format_html('<time datetime="{}" title="{}">{}</time>', moment.isoformat(), exact(moment), text)


TONES = {  # of statuses and risks; any other is "plain"
    **dict.fromkeys(("awaiting-approval", "pending", "paused", "dry-run"), "waits"),
    **dict.fromkeys(("completed", "approved", "consumed", "answered", "active"), "good"),
    **dict.fromkeys(("orphaned", "failed", "denied", "stopped", "high"), "bad"),
}


def status_badge(row: Run | Approval | ApprovalRule) -> SafeString:
    """Build the badge of the status of a run, an approval or a rule."""
    return badge(TONES.get(row.status, "plain"), row.get_status_display())


def risk_badge(approval: Approval) -> SafeString:
    """Build the badge of an approval's risk."""
    label = _("%(risk)s risk") % {"risk": approval.get_risk_display()}
    return badge(TONES.get(approval.risk, "plain"), label)


def badge(tone: str, label: str) -> SafeString:
    """Build the HTML of a word in a frame, coloured by its tone."""
    return format_html('<span class="ar-badge ar-tone--{}">{}</span>', tone, label)
