"""Erasing a row of a run: the page that says what goes and what cannot be reached, and its button."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from agentruns.admin.base import status_of
from agentruns.admin.forms import EraseForm
from agentruns.admin.html import plain
from agentruns.exceptions import AgentRunsError
from agentruns.models import Run
from agentruns.services.erasure import UNREACHED, Erased, erase_rows

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

SHOWN = 50  # rows


def erase_view(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Say what goes with a row; erase it by POST, with a reason."""
    form = EraseForm(request.POST if request.method == "POST" else None)
    confirmed = form.is_valid()
    reason = form.cleaned_data["reason"] if confirmed else "a dry run keeps none"
    erased, status, refusal = Erased(), 400 if form.is_bound else 200, ""
    try:
        erased = erase_rows(run.pk, request.user, reason, seq=seq, dry_run=not confirmed)
    except AgentRunsError as error:
        status, refusal = status_of(error), plain(error)
    if confirmed and not refusal:
        admin.log_change(request, run, _("Erased row %(seq)s.") % {"seq": seq})
        done = _("Erased. Rows: %(rows)d, approvals: %(approvals)d, files: %(files)d.")
        counts = {"rows": len(erased.rows), "approvals": erased.approvals, "files": erased.files}
        admin.message_user(request, done % counts, messages.SUCCESS)
        return admin.back(request, run)
    context: dict[str, Any] = {
        "refusal": refusal,
        "erase_url": admin.url(request, "erase", run.pk, seq),
        "erased": None if refusal else erased,
        "rows": [{"run": str(pk), "seq": str(at), "kind": kind} for pk, at, kind in erased.rows[:SHOWN]],
        "more": max(0, len(erased.rows) - SHOWN),
        "unreached": UNREACHED,
        "erase_form": form,
    }
    title, template = _("Erase row %d") % seq, "agentruns/admin/erase.html"
    return admin.render(request, run, title=title, status=status, template=template, **context)
