"""The run page while the run goes on: its timeline, and what a page that is open asks for to stay true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.urls import URLPattern, path
from django.utils import timezone

from agentruns.admin import paging, timeline, waiting
from agentruns.admin.overview import RunOverview
from agentruns.admin.readonly import READING
from agentruns.conf import settings
from agentruns.journal.read import run_rows
from agentruns.models import Message, Run
from agentruns.utils import json as canonical


@dataclass(frozen=True, slots=True)
class Live:
    """What a page needs to follow a run; as long as `tag` is the same there is nothing new."""

    url: str
    page: str
    tag: str
    status: str
    is_ended: bool
    interval: str


class RunLive(RunOverview):
    """The timeline, and the fragment that an open page asks for, for the admin of runs."""

    live_interval = 2000  # milliseconds

    def get_urls(self) -> list[URLPattern]:
        """Add what an open page asks for."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/live/", view(self.live_view), name=self.name("live")),
            *super().get_urls(),
        ]

    def live_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Return the run page without the site around it, or 204 if nothing changed since `seen`."""
        if request.method not in READING:
            return HttpResponseNotAllowed(READING)
        run = self.find(request, object_id)
        live = self._live(request, run)
        if request.GET.get("seen") == live.tag:
            return HttpResponse(status=204)
        return self.page(request, run, base="agentruns/admin/fragment.html", live=live)

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run, which follows the run."""
        # Before the rows are read: what comes in between is then new to the page, and not missed.
        context.setdefault("live", self._live(request, obj))
        return super().page(request, obj, status=status, **context)

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the timeline."""
        return {**super().sections(request, run), "timeline": self._timeline(request, run)}

    def _live(self, request: HttpRequest, run: Run) -> Live:
        seq = paging.last_seq(settings.DATABASE, run.pk)
        waits = [run.blocked_reason, run.attempts, waiting.is_live(run), waiting.backs_off(run)]
        return Live(
            url=self.url(request, "live", run.pk),
            page=self.url(request, "change", run.pk),
            tag=canonical.digest([str(run.pk), run.status, seq, *waits])[:16],
            status=run.status,
            is_ended=run.is_ended,
            interval=str(self.live_interval),
        )

    def _timeline(self, request: HttpRequest, run: Run) -> timeline.Timeline:
        alias, page = settings.DATABASE, self.url(request, "change", run.pk)
        page += "&" if "?" in page else "?"
        seqs = (
            Message.objects.using(alias).filter(run_id=run.pk).order_by("-seq").values_list("seq", flat=True)
        )
        first = seqs[timeline.ROWS : timeline.ROWS + 1].first()
        rows = run_rows(alias, run.pk, first or 0)
        return timeline.draw(
            rows,
            timezone.now(),
            doing=_doing(run),
            is_ended=run.is_ended,
            is_whole=first is None,
            url=lambda seq: f"{page}after={seq - 1}#row-{seq}",
        )


def _doing(run: Run) -> str:
    if run.status == Run.Status.RUNNING:
        return "model" if waiting.is_live(run) else "silent"
    return "queue" if run.status == Run.Status.QUEUED else ""
