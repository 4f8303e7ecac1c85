"""The page of a run: where it stands and why, its journal; and what keeps it up to date."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from agentruns.admin.base import READING
from agentruns.admin.forms import CancelForm, PauseForm, ResumeForm
from agentruns.admin.html import (
    EMPTY,
    Body,
    Fact,
    body,
    dated,
    exact,
    plain,
    pretty,
    run_badge,
    visible,
)
from agentruns.admin.runs import actions
from agentruns.admin.runs.actions import Situation
from agentruns.admin.runs.list import words
from agentruns.admin.runs.steps import RowCard, mask_for, row_card, starts
from agentruns.admin.runs.timing import timings
from agentruns.conf import settings
from agentruns.journal.events import Row
from agentruns.journal.policy import visible_runs
from agentruns.journal.read import read_rows, run_rows
from agentruns.models import Approval, Message, Run
from agentruns.services import waiting
from agentruns.services.transfer import MARK
from agentruns.services.waiting import is_live
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

PAGE = 100  # journal rows
BEFORE = 20  # rows before a page that its first steps are timed from
LARGEST = 2**63  # every seq is less: databases store no larger one


@dataclass(frozen=True, slots=True)
class Live:
    """The values by which an open page follows a run; as long as `tag` is the same there is nothing new."""

    url: str
    page: str
    tag: str
    status: str
    is_ended: bool
    interval: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A page of the journal; `earlier` and `later` are the `after` of the pages beside it, None if none."""

    rows: list[Row]
    earlier: int | None
    later: int | None
    latest: int | None


def overview(admin: RunAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Return where the run stands, the buttons beside it, and its journal."""
    run = situation.run
    uncleared = waiting.uncleared(settings.DATABASE, run, mask_for(run), visible_runs(request.user))
    situation, shown = replace(situation, uncleared=len(uncleared)), mask_for(run).run(run)
    waits = [(wait, admin.wait_url(request, wait)) for wait in situation.waits]
    rows = journal_rows(settings.DATABASE, run.pk, seq_of(request.GET.get("after", "")))
    return {
        "run_id": str(run.pk),
        "badge": run_badge(run),
        "stalled": waiting.is_stalled(run),
        "headline": actions.headline(situation),
        "notes": [*actions.notes(situation), *starts(run)],
        "reasons": [({"text": words(wait)}, url) for wait, url in waits],
        "uncleared": [({"text": words(wait)}, admin.wait_url(request, wait)) for wait in uncleared],
        "doubt_url": next((url for wait, url in waits if wait.kind == waiting.ORPHAN), ""),
        "resume": actions.resume(situation),
        "resume_url": admin.url(request, "resume", run.pk),
        "resume_form": ResumeForm(initial={"seq": str(actions.last_seq(run))}),
        "pause": actions.pause(situation),
        "pause_url": admin.url(request, "pause", run.pk),
        "pause_form": PauseForm(auto_id="pause_%s"),
        "cancel": actions.cancel(situation),
        "cancel_url": admin.url(request, "cancel", run.pk),
        "cancel_form": CancelForm(auto_id="cancel_%s"),
        "facts": facts(shown),
        "bodies": texts(shown),
        "journal": rows,
        "last_shown": rows.rows[-1].seq if rows.rows else 0,
        "cards": _cards(admin, request, run, rows),
    }


def facts(run: Run) -> list[Fact]:
    """Return the facts of a run, the ones an operator asks for first at the top."""
    tokens = {name: amount for name, amount in run.usage.items() if name != "cost"}
    usage = ", ".join(f"{plain(name)} {amount}" for name, amount in tokens.items())
    found = [
        Fact(_("Run"), str(run.pk)),
        Fact(_("Agent"), _("%(agent)s, version %(version)s") % {"agent": run.agent, "version": run.version}),
        Fact(_("Session"), visible(run.session.key)),
        *([Fact(_("Scope"), visible(run.scope))] if run.scope else []),
        Fact(_("Requester"), visible(run.owner_name or EMPTY)),
        Fact(_("Started"), dated(run.created_at)),
        Fact(_("Last change"), dated(run.updated_at)),
        Fact(_("Model replies"), run.step),
        Fact(_("Tokens"), usage or EMPTY),
        Fact(_("Cost"), visible(run.usage.get("cost", EMPTY))),
        Fact(_("Worker"), _lease(run)),
        Fact(_("Worker last heard"), dated(_heard(run))),
        Fact(_("Crashes in a row"), run.attempts),
        Fact(_("Definition"), run.definition_id[:12], run.definition_id),
    ]
    if run.session.imported_at:
        text = _("%(when)s: a record; its decisions were made in another database")
        found.append(Fact(_("Imported"), text % {"when": exact(run.session.imported_at)}))
    if run.idempotency_key:
        found.append(Fact(_("Idempotency key"), visible(run.idempotency_key)))
    if run.not_before:
        found.append(Fact(_("Not before"), dated(run.not_before)))
    if run.blocked_reason:
        found.append(Fact(_("Why it is blocked"), visible(run.blocked_reason)))
    return found


def texts(run: Run) -> list[Body]:
    """Return input, output and error, in full."""
    found = [body(_("Input"), run.input)]
    if run.output:
        found.append(body(_("Output"), run.output))
    if run.error:
        found.append(body(_("Error"), run.error))
    return found


def live_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Return the run page without the site around it, or 204 if nothing changed since `seen`."""
    if request.method not in READING:
        return HttpResponseNotAllowed(READING)
    now = live(admin, request, run)
    if request.GET.get("seen") == now.tag:
        return HttpResponse(status=204)
    return admin.page(request, run, base="agentruns/admin/fragment.html", live=now)


def live(admin: RunAdmin, request: HttpRequest, run: Run) -> Live:
    """Return what an open page needs to follow the run from now on."""
    state = [run.status, run.blocked_reason, run.attempts, is_live(run), waiting.waits_for_time(run)]
    about = canonical.dumps([str(run.pk), actions.last_seq(run), *state])
    tag = salted_hmac("agentruns.tag", about, algorithm="sha256")  # the reason may hold what is redacted
    return Live(
        url=admin.url(request, "live", run.pk),
        page=admin.url(request, "change", run.pk),
        tag=tag.hexdigest()[:16],
        status=run.status,
        is_ended=run.is_ended,
        interval=str(admin.live_interval),
    )


def row_view(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Return one journal row in full, as plain text."""
    found = run_rows(settings.DATABASE, run.pk, seq - 1, 1) if seq < LARGEST else []
    row = found[0] if found else None
    if row is None or row.seq != seq:
        raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
    shown = mask_for(run).row(row).shown()
    return as_text(pretty({name: value for name, value in shown.items() if value is not None}))


def as_text(text: str) -> HttpResponse:
    """Return a text as a page that no browser takes for anything else."""
    return HttpResponse(
        plain(text),
        content_type="text/plain; charset=utf-8",
        headers={"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'"},
    )


def journal_rows(alias: str, run_id: UUID, after: int | None, size: int = PAGE) -> Rows:
    """Return the rows after a seq, found by seq and not by offset; without one, the latest page."""
    seqs = Message.objects.using(alias).filter(run_id=run_id)
    latest = _start(seqs, size)
    if after is None:
        after = latest
    rows = run_rows(alias, run_id, after, size + 1)
    more, rows = len(rows) > size, rows[:size]
    first = rows[0].seq if rows else after + 1
    has_earlier = after > 0 and seqs.filter(seq__lt=first).exists()
    return Rows(
        rows,
        earlier=_start(seqs.filter(seq__lt=first), size) if has_earlier else None,
        later=rows[-1].seq if more else None,
        latest=latest if more else None,
    )


def seq_of(text: str) -> int | None:
    """Return the seq that a URL asks for; None where it asks for none, or for no possible one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _start(rows: QuerySet[Message], size: int) -> int:
    """Return the `after` of the last page of `rows`."""
    seqs = list(rows.order_by("-seq").values_list("seq", flat=True)[:size])
    return seqs[-1] - 1 if len(seqs) == size else 0


def _cards(admin: RunAdmin, request: HttpRequest, run: Run, rows: Rows) -> list[tuple[RowCard, str]]:
    earlier: list[Row] = []
    if rows.rows and rows.earlier is not None:  # what ends on this page may have begun on the one before
        seqs = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq__lt=rows.rows[0].seq)
        earlier = read_rows(seqs.order_by("-seq")[:BEFORE])[::-1]
    times = timings([*earlier, *rows.rows])
    cards = [row_card(mask_for(run).row(row)) for row in rows.rows]
    for card in cards:
        card.timing = times.get(int(card.seq))
        if run.session.imported_at:
            card.who = visible(f"{card.who}{MARK}")
        card.call_url = admin.url(request, "call", run.pk, card.call) if card.call else ""
    return [(one, admin.other_page(request, Approval, one.approval) if one.approval else "") for one in cards]


def _heard(run: Run) -> datetime | None:
    """Return when the worker last extended its lease: it does so for a fixed time."""
    expires = run.lease_expires_at
    return expires - timedelta(seconds=settings.LEASE_SECONDS) if expires else None


def _lease(run: Run) -> str:
    if run.lease_expires_at is None:
        return _("none")
    template = _("%(owner)s until %(when)s") if is_live(run) else _("%(owner)s, silent since %(when)s")
    return template % {"owner": run.lease_owner[:8], "when": exact(run.lease_expires_at)}
