"""For auditors: the check of a run's journal, the downloads, and the erasure of a row."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import TextField
from django.db.models.functions import Cast
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _

from agentruns.admin.base import CHANNEL, ReadOnlyAdmin, mask_for, status_of
from agentruns.admin.forms import EraseForm
from agentruns.admin.html import bare, plain, pretty
from agentruns.admin.runs import page
from agentruns.admin.runs.list import task_title
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, DurableRunNotFoundError, PayloadError
from agentruns.journal import read, verify
from agentruns.journal.policy import visible_approvals, visible_runs
from agentruns.models import Approval, Message, Run, Session
from agentruns.services import permissions, transfer
from agentruns.services.data import erasure
from agentruns.utils import clock

TRIES = 10
SHOWN = 50  # rows that erasing takes with it
PROBLEMS = 20  # on the page
LARGEST = 2**63  # every seq is less: databases store no larger one
COLUMNS = ("seq", "kind", "call_id", "tool_name", "attempt", "epoch", "prev_hash", "hash")


def verify_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Verify the whole journal of the run's session and show the result. Stores nothing."""
    checked, title = finding(request, run), task_title(run)
    return admin.render(request, run, title=title, template="run_chain", verified=checked)


def row_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Send one journal row, masked, as plain text; without its payload if the payload cannot be read.

    Raises Http404 if the run has no such row.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq=seq if seq < LARGEST else 0)
    if not rows.exists():
        raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
    try:
        row = mask_for(run).row(read.read_rows(rows)[0]).shown()
        text = pretty({name: value for name, value in row.items() if value is not None})
    except read.UNREADABLE:
        if not verify.check(run.session_id, settings.DATABASE):
            raise
        # The row without its payload: what cannot be parsed cannot be masked either.
        parts = {f"{name}_text": Cast(name, TextField()) for name in ("facts", "content")}
        written = {"written": Cast("created_at", TextField()), **parts}
        values = rows.annotate(**written).values(*COLUMNS, *written)[0]
        count = {"count": sum(len(values.pop(name) or "") for name in parts)}
        note = _("The content, %(count)d characters, cannot be read, so it is not shown.")
        text = "\n".join([*(f"{name}: {value}" for name, value in values.items()), "", note % count])
    # No browser takes it for anything else.
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'"}
    return HttpResponse(bare(text), content_type="text/plain; charset=utf-8", headers=headers)


def export_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponseBase:
    """Stream the run's redacted export for an auditor, and log that; raises PermissionDeniedError."""
    export = transfer.download_export(request, run)
    admin.log_change(request, run, _("Exported for an auditor."))
    return export


def content_view(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int = 0, sha256: str = ""
) -> HttpResponseBase:
    """Stream the full content of a row, or the picture or document with the SHA-256 `sha256`.

    Guarded content requires a POST and the permission to reveal; a GET shows a page instead. Raises
    PermissionDenied, and Http404 if there is no such content. Status 409 if the content is damaged.
    """
    content, refusal, may_reveal = None, "", permissions.may_reveal(request.user, run)
    try:
        if sha256:
            content = transfer.find_file(run, sha256)
        else:
            content = transfer.find_content(run, seq if seq < LARGEST else 0)
        seq = content.stored.seq
        if not content.guarded or request.method == "POST":
            if content.guarded and not may_reveal:
                raise PermissionDenied
            chunks = transfer.read_content(content, request.user, door=CHANNEL)
            if content.guarded:
                admin.log_change(request, run, _("Downloaded the true content of row %d.") % seq)
            return transfer.download(request, chunks, content.headers)
    except DurableRunNotFoundError as error:
        raise Http404(str(error)) from error
    except PayloadError as error:
        refusal = plain(error)
    return admin.render(
        request,
        run,
        title=_("The content of row %d") % seq,
        status=409 if refusal else 200,
        template="content",
        seq=str(seq),
        content=content,
        storage=settings.PAYLOAD_STORAGE,
        may_reveal=may_reveal,
        refusal=refusal,
    )


def erase_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Show the rows that would be erased with a row; erase them by POST, with a reason."""
    form = EraseForm(request.POST if request.method == "POST" else None)
    confirmed = form.is_valid()
    reason = form.cleaned_data["reason"] if confirmed else "a dry run keeps none"
    erased, status, refusal = erasure.Erased(), 400 if form.is_bound else 200, ""
    try:
        erased = erasure.erase_rows(run.pk, request.user, reason, seq=seq, dry_run=not confirmed)
    except AgentRunsError as error:
        status, refusal = status_of(error), plain(error)
    if confirmed and not refusal:
        done = _("Erased. Rows: %(rows)d, approvals: %(approvals)d, files: %(files)d.")
        counts = {"rows": len(erased.rows), "approvals": erased.approvals, "files": erased.files}
        return admin.done(request, run, _("Erased row %(seq)s.") % {"seq": seq}, done % counts)
    return admin.render(
        request,
        run,
        title=_("Erase row %d") % seq,
        status=status,
        template="erase",
        refusal=refusal,
        seq=seq,
        erased=None if refusal else erased,
        rows=[{"run": pk, "seq": at, "kind": kind} for pk, at, kind in erased.rows[:SHOWN]],
        more=max(0, len(erased.rows) - SHOWN),
        unreached=erasure.UNREACHED,
        erase_form=form,
    )


def damaged_page(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, checked: dict[str, Any], **context: Any
) -> HttpResponse:
    """Render the page of a run whose journal cannot be read, with what is known without it."""
    approvals = visible_approvals(request.user).filter(run_id=run.pk).defer("arguments")
    newest = reversed(approvals.order_by("-requested_at")[: page.PAGE])
    mask = mask_for(run)
    run = mask.run(run)
    known = {
        "unreadable": True,
        "verified": checked,
        **page.about(run),
        "approvals": [(mask.approval(card), admin.other_page(request, Approval, card.pk)) for card in newest],
    }
    return admin.render(request, run, title=task_title(run), template="run_chain", **known, **context)


def finding(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Check the journal of a run's session; report the problems, and the last row's number and hash."""
    sessions = Session.objects.using(settings.DATABASE).filter(pk=run.session_id)
    for _try in range(TRIES):
        session, problems = sessions.get(), verify.check(run.session_id, settings.DATABASE)
        if sessions.filter(next_seq=session.next_seq, head=session.head).exists():
            break  # nobody wrote to the session meanwhile
    bad = next((each.seq for each in problems if each.seq is not None), None)
    rows = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id, seq=bad or 0)
    return {
        "is_intact": not problems,
        "is_chained": bad is None,
        "problems": [each.what for each in problems[:PROBLEMS]],
        "left_out": max(0, len(problems) - PROBLEMS),
        "at": clock.now(settings.DATABASE),
        "seq": session.next_seq - 1,
        "head": session.head,
        "bad_seq": bad,
        "row_of": rows.filter(run__in=visible_runs(request.user)).values_list("run_id", flat=True).first(),
    }
