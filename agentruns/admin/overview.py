"""The page of a run: where it stands, why, what can be done, and its journal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from agentruns.admin import advice, badges, facts, paging, waiting
from agentruns.admin.controls import RunControls
from agentruns.admin.forms import CancelForm, ResumeForm
from agentruns.admin.journal import Card, card
from agentruns.admin.text import plain, pretty, visible
from agentruns.admin.times import age
from agentruns.conf import settings
from agentruns.journal.masking import Sensitive, masked, sensitive_in
from agentruns.journal.read import run_rows
from agentruns.models import Approval, Run
from agentruns.services import permissions


class RunOverview(RunControls):
    """The page of one run, for the admin of runs."""

    page_template = "agentruns/admin/run.html"

    def get_urls(self) -> list[URLPattern]:
        """Add the page of one journal row."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/rows/<int:seq>/", view(self.row_view), name=self.name("row")),
            *super().get_urls(),
        ]

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run."""
        uncleared = waiting.uncleared(settings.DATABASE, obj)
        situation = replace(self.situation(request, obj), uncleared=len(uncleared))
        reasons = self._linked(request, situation.reasons)
        rows = paging.page(settings.DATABASE, obj.pk, paging.seq_of(request.GET.get("after", "")))
        title = _("%(agent)s in %(session)s") % {"agent": obj.agent, "session": plain(obj.session.key)}
        sections = {
            "run_id": str(obj.pk),
            "badge": badges.run(obj),
            "headline": advice.headline(situation),
            "notes": advice.notes(situation),
            "reasons": reasons,
            "uncleared": self._linked(request, uncleared),
            "doubt_url": next((url for reason, url in reasons if reason.is_doubt), ""),
            "resume": advice.resume(situation),
            "resume_url": self.url(request, "resume", obj.pk),
            "resume_form": ResumeForm(initial={"seq": str(paging.last_seq(settings.DATABASE, obj.pk))}),
            "cancel": advice.cancel(situation),
            "cancel_url": self.url(request, "cancel", obj.pk),
            "cancel_form": CancelForm(auto_id="cancel_%s"),
            "facts": facts.of_run(obj),
            "bodies": facts.texts_of_run(obj),
            "approvals": self._approvals(request, obj),
            "journal": rows,
            "last_shown": rows.rows[-1].seq if rows.rows else 0,
            "cards": self._cards(request, obj, rows),
        }
        sections |= self.sections(request, obj)
        return self.render(request, obj, title=title, status=status, **{**sections, **context})

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Return what else the page shows; each part of the admin adds its own."""
        return {}

    def situation(self, request: HttpRequest, run: Run) -> advice.Situation:
        """Return what is known of the run now, and what this user may do about it."""
        alias, user = settings.DATABASE, request.user
        return advice.Situation(
            run=run,
            reasons=waiting.reasons(alias, [run]).get(run.pk, []),
            cancel_requested=None if run.is_ended else waiting.cancel_request(alias, run),
            sweeper_seen=waiting.sweeper_seen(alias) if run.status in ("queued", "running") else None,
            may_resume=user.has_perm("agentruns.resume_run"),
            may_cancel=user.has_perm("agentruns.cancel_run") or permissions.owns(user, run),
        )

    def sensitive(self, run: Any) -> Sensitive:
        """Return what is masked on the pages of a run; asked once for an object read for one request."""
        if not hasattr(run, "masks"):
            run.masks = sensitive_in(run)
        masks: Sensitive = run.masks
        return masks

    def row_view(self, request: HttpRequest, object_id: str, seq: int) -> HttpResponse:
        """Return one journal row in full, as plain text."""
        run = self.find(request, object_id)
        found = run_rows(settings.DATABASE, run.pk, seq - 1, 1) if seq < paging.LARGEST else []
        row = found[0] if found else None
        if row is None or row.seq != seq:
            raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
        shown = masked(row, sensitive_in(run))
        text = pretty({name: value for name, value in shown._asdict().items() if value is not None})
        return as_text(text)

    def reason_url(self, request: HttpRequest, reason: waiting.Reason) -> str:
        """Return where a person acts on what a run waits for, or ""."""
        if reason.approval is not None:
            return self.other_page(request, Approval, reason.approval)
        return self.url(request, "call", reason.run, reason.call) if reason.call else ""

    def _linked(self, request: HttpRequest, reasons: list[waiting.Reason]) -> list[tuple[Any, str]]:
        return [(reason, self.reason_url(request, reason)) for reason in reasons]

    def _approvals(self, request: HttpRequest, run: Run) -> list[dict[str, Any]]:
        approvals = Approval.objects.using(settings.DATABASE).filter(run_id=run.pk).defer("arguments")
        return [
            {
                "title": visible(approval.title),
                "badge": badges.approval(approval),
                "by": visible(approval.decided_by_name or "-"),
                "asked": age(approval.requested_at),
                "url": self.other_page(request, Approval, approval.pk),
            }
            for approval in approvals.order_by("requested_at")
        ]

    def _cards(self, request: HttpRequest, run: Run, rows: paging.Page) -> list[tuple[Card, str]]:
        sensitive = self.sensitive(run)
        cards = [card(masked(row, sensitive)) for row in rows.rows]
        return [
            (one, self.other_page(request, Approval, one.approval) if one.approval else "") for one in cards
        ]


def as_text(text: str) -> HttpResponse:
    """Return a text as a page that no browser takes for anything else."""
    return HttpResponse(
        plain(text),
        content_type="text/plain; charset=utf-8",
        headers={"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'"},
    )
