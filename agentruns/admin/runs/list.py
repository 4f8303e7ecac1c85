"""The list of runs: its rows, its cells, and why each run does not go on."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.html import age, ago, exact, plain, run_badge, visible
from agentruns.admin.runs.steps import mask_for
from agentruns.journal.fold import TOKENS
from agentruns.models import Run
from agentruns.services import waiting
from agentruns.services.waiting import Wait
from agentruns.tools.card import one_line

CENT = Decimal("0.01")
LEAST = Decimal("0.0001")
TITLE = 100  # characters


def task_title(run: Run) -> str:
    """Return the name of a run for people: the first line of its task, masked; not escaped.

    A list sets `run.mask` first, or each run's mask is read by itself.
    """
    title = one_line(plain(mask_for(run).run(run).title), TITLE)
    return title or _("%(agent)s in %(session)s") % {"agent": run.agent, "session": plain(run.session.key)}


def why(waits: list[Wait], url: Callable[[Wait], str]) -> SafeString | str:
    """Return what a run waits for on one line, with a link to the card of a call in doubt."""
    if not waits:
        return ""
    text = words(waits[0])
    if len(waits) > 1:
        text = _("%(first)s (and %(count)d more)") % {"first": text, "count": len(waits) - 1}
    if waits[0].kind != waiting.ORPHAN:
        return text
    return format_html('<a href="{}">{}</a>', url(waits[0]), text)


def words(wait: Wait) -> str:
    """Return one thing that a run waits for as a sentence, fit for a page."""
    tool, text = plain(wait.tool), plain(wait.text)
    if wait.kind == waiting.ORPHAN:
        return _("A call of %(tool)s is in doubt") % {"tool": tool}
    if wait.kind == waiting.UNCLEARED:
        sentence = _("A call of %(tool)s was told to the model as unknown; nobody has cleared it.")
        if text:
            sentence = _("A call of %(tool)s raised an error and is in doubt; nobody has cleared it.")
        if wait.gates_tool:
            sentence += " " + _("Until then each further call of %(tool)s asks a person.")
        return sentence % {"tool": tool}
    if wait.kind == waiting.APPROVAL:
        return _("Waits for approval: %(title)s") % {"title": text}
    if wait.kind == waiting.PAUSED:
        return _("Paused: %(reason)s") % {"reason": text or "-"}
    if wait.kind == waiting.SILENT:
        return _("Its worker is silent; the next sweep takes it over")
    if wait.kind == waiting.SCHEDULED and wait.until is not None:
        return _("Starts at %(time)s") % {"time": exact(wait.until)}
    if wait.until is not None:
        return _("The model failed; tried again %(when)s") % {"when": ago(wait.until)}
    return text


def status(run: Run) -> SafeString:
    """Return the status of a run, and that it is stalled if its worker has fallen silent."""
    badge = run_badge(run)
    if not waiting.is_stalled(run):
        return badge
    return format_html('{} <span class="ar-badge ar-tone--bad">{}</span>', badge, _("stalled"))


def heartbeat(run: Run) -> SafeString | str:
    """Return until when a worker holds the run, or since when none was heard of; "" if it has none."""
    until = run.lease_expires_at
    if run.status != Run.Status.RUNNING or until is None:
        return ""
    if not waiting.is_live(run):
        return format_html("{} {}", _("silent for"), age(until))
    clock = f"{timezone.localtime(until):%H:%M:%S}"
    moment = format_html('<time datetime="{}" title="{}">{}</time>', until.isoformat(), exact(until), clock)
    return format_html("{} {}", _("live until"), moment)


def tokens(usage: dict[str, Any]) -> SafeString | str:
    """Return how many tokens were read and written, what a budget counts, each kind as a tooltip."""
    kinds = {kind: usage[kind] for kind in TOKENS if usage.get(kind)}
    if not kinds:
        return ""
    each = ", ".join(f"{kind} {amount}" for kind, amount in kinds.items())
    text = _("%(count)s tokens") % {"count": short(sum(kinds.values()))}
    return format_html('<span title="{}">{}</span>', each, text)


def short(number: int) -> str:
    """Return 999, 12.3k or 4.5M."""
    for size, sign in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return number_format(number // (size // 10) / 10, 1) + sign
    return str(number)


def cost(usage: dict[str, Any]) -> SafeString | str:
    """Return what the replies cost by the project's prices, shortly, the exact amount as a tooltip."""
    given = usage.get("cost")
    try:
        amount = Decimal(str(given))
    except InvalidOperation:
        return visible(given or "")
    if not amount.is_finite() or amount.adjusted() > 15:
        return visible(given)
    text = number_format(amount.quantize(CENT if amount >= 1 else LEAST))
    text = _("cost %(amount)s") % {"amount": text if amount >= LEAST or not amount else f"< {LEAST}"}
    return format_html('<span title="{}">{}</span>', visible(given), text)
