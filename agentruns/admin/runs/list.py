"""The cells of the list of runs: task, outcome or reason for a wait, and use of tokens and money."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, ngettext

from agentruns.admin import html
from agentruns.admin.base import ReadOnlyAdmin, mask_for
from agentruns.admin.markdown import unmarked
from agentruns.conf import settings
from agentruns.journal import fold, masking
from agentruns.models import Approval, Review, Run
from agentruns.models.event import CHILD
from agentruns.services.runs import waiting
from agentruns.tools.builtin import TASK, TIMER

LINE = 110  # characters of a second line
READ = 5 * LINE  # characters of an answer, of which its markdown takes some
CENT = Decimal("0.01")
LEAST = Decimal("0.0001")
TITLE = 100  # characters
KEY = 32  # characters of an event's key


def task_title(run: Run) -> str:
    """Name a run by the first line of its task, or else by agent and session; masked, not escaped.

    A list should set `run.mask` first: otherwise each run's mask takes queries of its own.
    """
    names = {"agent": html.plain(run.agent), "session": html.plain(run.session.key)}
    return html.plain_line(mask_for(run).run(run).title, TITLE) or _("%(agent)s in %(session)s") % names


def second(run: Any) -> str:
    """Describe on one line why a run waits, how many steps it has made, or its outcome."""
    waits: list[waiting.Wait] = run.waits
    if waits:
        others = [wait for wait in waits if wait.kind != waiting.PAUSED] or waits
        text = words(others[0])
        if len(others) > 1:
            text = _("%(first)s (and %(count)d more)") % {"first": text, "count": len(others) - 1}
        if len(others) < len(waits):
            text = _("Paused. %(text)s") % {"text": text}
        if waits[0].kind == waiting.SILENT and run.lease_expires_at:
            silent = html.words(run.lease_expires_at)
            text = _("Silent for %(time)s. %(text)s") % {"time": silent, "text": text}
        return html.cut(text, LINE)
    if run.status == Run.Status.RUNNING:
        text = ngettext("At work, %(count)d step so far", "At work, %(count)d steps so far", run.step)
        return text % {"count": run.step}
    return html.plain_line(run.came, LINE)


def came(run: Any, mask: masking.Mask) -> str:
    """Format the error of a failed run, or else the answer, masked; "" for a text too long for a list."""
    if run.status == Run.Status.FAILED:
        return html.reason(mask.json(run.error_text) or "")
    return unmarked(html.bare(mask.json(run.answer) or "")[:READ], hide=mask.json)


def words(wait: waiting.Wait) -> str:
    """Describe one reason for a wait in a sentence, fit for a page."""
    tool, text = html.plain(wait.tool), html.plain(wait.text)
    if wait.kind == waiting.ORPHAN:
        return _("A call of %(tool)s is in doubt") % {"tool": tool}
    if wait.kind == waiting.UNCLEARED:
        sentence = _("The outcome of a call of %(tool)s is unknown; nobody has cleared it.")
        if text:
            sentence = _("A call of %(tool)s raised an error and is in doubt; nobody has cleared it.")
        if wait.gates_tool:
            sentence += " " + _("Until then each further call of %(tool)s asks a person.")
        return sentence % {"tool": tool}
    if wait.kind == waiting.APPROVAL:
        return _("Waits for approval: %(title)s") % {"title": text}
    if wait.kind == waiting.EVENT:
        if wait.event == CHILD:
            sentence = _("Waits for run %(run)s, which a call of %(tool)s started")
            return sentence % {"run": html.short_id(text), "tool": tool}
        event = _("a task of the MCP server") if wait.event == TASK else html.plain(wait.event)
        facts = {"event": event, "key": html.plain_line(wait.text, KEY), "until": html.exact(wait.until)}
        if wait.event == TIMER and wait.until is not None:
            return _("Waits until %(until)s") % facts
        sentence = _("Waits for %(event)s %(key)s, until %(until)s")
        return (sentence if wait.until else _("Waits for %(event)s %(key)s")) % facts
    if wait.kind == waiting.PAUSED:
        return _("Paused: %(reason)s") % {"reason": text or "-"}
    if wait.kind == waiting.SILENT:
        return _("Its worker is silent; another one takes the run over")
    if wait.kind == waiting.SCHEDULED and wait.until is not None:
        return _("Starts at %(time)s") % {"time": html.exact(wait.until)}
    if wait.until is not None:
        return _("The model failed; next attempt %(when)s") % {"when": html.ago(wait.until)}
    return text.replace(f"Run {wait.run_id} ", "It ", 1)  # the page or line is about this run anyway


def note_waits(runs: Iterable[Any]) -> None:
    """Note as `waits_for` on each run for which child runs it waits, in words; one query."""
    its = {run.pk: run for run in runs}
    for run_id, waits in waiting.events_of(settings.DATABASE, its.values()).items():
        its[run_id].waits_for = "; ".join(words(wait) for wait in waits if wait.event == CHILD)


def wait_url(admin: ReadOnlyAdmin, request: HttpRequest, wait: waiting.Wait) -> str:
    """Build the URL where a person has to end a wait; "" if the wait is for no person."""
    if wait.approval_id is not None:
        return admin.other_page(request, Approval, wait.approval_id)
    is_theirs = wait.call_id and wait.kind != waiting.EVENT
    return admin.url(request, "call", wait.run_id, wait.call_id) if is_theirs else ""


def status(run: Run) -> SafeString:
    """Build the badge of a run's status, with another one if the run is stalled."""
    badge = html.status_badge(run)
    return format_html("{} {}", badge, html.badge("bad", _("stalled"))) if waiting.is_stalled(run) else badge


def reviewed(review: Review | None) -> str:
    """Describe a review's rating and assignee on one line; "" without a review."""
    if review is None:
        return ""
    rating = _("rated %(rating)s") % {"rating": review.get_rating_display()} if review.rating else ""
    whose = _("for %(name)s") % {"name": html.plain(review.assignee_name)} if review.assignee_name else ""
    return ", ".join(part for part in (rating, whose) if part)


def tokens(usage: dict[str, Any]) -> SafeString | str:
    """Format the number of tokens that a budget counts, each kind in a tooltip; "" if none was used."""
    if not (kinds := {kind: usage[kind] for kind in fold.TOKENS if usage.get(kind)}):
        return ""
    each = ", ".join(f"{kind} {amount}" for kind, amount in kinds.items())
    return format_html('<span title="{}">{}</span>', each, short(sum(kinds.values())))


def counts(usage: dict[str, Any]) -> str:
    """Format the number of tokens of each kind."""
    return ", ".join(f"{html.plain(name)} {amount}" for name, amount in usage.items() if name != "cost")


def short(number: int) -> str:
    """Format a number as 999, 12.3k or 4.5M."""
    for size, sign in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return number_format(number // (size // 10) / 10, 1) + sign
    return str(number)


def cost(usage: dict[str, Any]) -> SafeString | str:
    """Format the cost of the replies, rounded, with the exact amount as a tooltip; "" if it is unknown."""
    given = usage.get("cost")
    with suppress(InvalidOperation):
        exactly = Decimal(str(given))
        if exactly.is_finite() and exactly.adjusted() <= 15:
            return format_html('<span title="{}">{}</span>', html.visible(given), amount(exactly))
    return html.visible(given or "")


def amount(cost: Decimal | None) -> str:
    """Format a cost in its currency, rounded; "" if no price is known."""
    if cost is None:
        return ""
    text = number_format(cost.quantize(CENT if cost >= 1 else LEAST))
    text = text if cost >= LEAST or not cost else f"< {LEAST}"
    return f"{text}\xa0{html.plain(settings.CURRENCY)}" if settings.CURRENCY else text
