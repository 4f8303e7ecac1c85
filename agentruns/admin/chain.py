"""Verify chain: is the journal of a run what was written? And the run's page where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import TextField
from django.db.models.functions import Cast
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin import advice, badges, facts
from agentruns.admin.overview import RunOverview, as_text
from agentruns.admin.text import plain, visible
from agentruns.admin.times import exact
from agentruns.conf import settings
from agentruns.exceptions import RunStateError
from agentruns.journal.verify import Problem, check
from agentruns.models import Message, Run, Session

# What a row that was altered can make of whoever reads it.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
TRIES = 10
MOST = 20  # problems on the page
COLUMNS = ("seq", "kind", "call_id", "tool_name", "attempt", "epoch", "prev_hash", "hash")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check of a session's journal found, and the head that it was checked against."""

    problems: list[SafeString]
    left_out: int
    is_chained: bool
    at: str
    seq: int
    head: str
    bad_seq: int | None
    row_url: str = ""

    @property
    def is_intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class RunChain(RunOverview):
    """The button that verifies, and a page that opens whatever was done to the journal."""

    chain_template = "agentruns/admin/run_chain.html"

    def get_urls(self) -> list[URLPattern]:
        """Add the button's target."""
        view = self.admin_site.admin_view
        verify = path("<str:object_id>/verify/", view(self.verify_view), name=self.name("verify"))
        return [verify, *super().get_urls()]

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the button."""
        return {**super().sections(request, run), **self._button(request, run)}

    def verify_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Read the whole journal of the run's session and say whether it is intact. Stores nothing."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, run)
        return self._chain_page(request, run, self._finding(request, run))

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run; of one whose journal cannot be read, what is known without it."""
        try:
            return super().page(request, obj, status=status, **context)
        except UNREADABLE:
            found = self._finding(request, obj)
            if found.is_intact:
                raise
        known = {
            "unreadable": True,
            "facts": facts.of_run(obj),
            "bodies": facts.texts_of_run(obj),
            "approvals": self._approvals(request, obj),
        }
        return self._chain_page(request, obj, found, status=status, **known, **context)

    def row_view(self, request: HttpRequest, object_id: str, seq: int) -> HttpResponse:
        """Return one journal row; of one that cannot be read, all but its payload."""
        try:
            return super().row_view(request, object_id, seq)
        except UNREADABLE:
            run = self.find(request, object_id)
            if not check(run.session_id, settings.DATABASE):
                raise
        return as_text(_unread(run, seq))

    def _act(
        self, request: HttpRequest, object_id: str, act: Callable[[Run], str], logged: str
    ) -> HttpResponse:
        def careful(run: Run) -> str:
            try:
                return act(run)
            except UNREADABLE as error:
                if not check(run.session_id, settings.DATABASE):
                    raise
                raise RunStateError(_("The journal of its session is damaged.")) from error

        return super()._act(request, object_id, careful, logged)

    def _finding(self, request: HttpRequest, run: Run) -> Finding:
        session, problems = _checked(run)
        bad = next((each.seq for each in problems if each.seq is not None), None)
        rows = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id, seq=bad or 0)
        of = rows.values_list("run_id", flat=True).first()
        return Finding(
            problems=[visible(each.what) for each in problems[:MOST]],
            left_out=max(0, len(problems) - MOST),
            is_chained=bad is None,
            at=exact(timezone.now()),
            seq=session.next_seq - 1,
            head=session.head,
            bad_seq=bad,
            row_url=self.url(request, "row", of, bad) if of else "",
        )

    def _chain_page(
        self, request: HttpRequest, run: Run, found: Finding, *, status: int = 200, **context: Any
    ) -> HttpResponse:
        context |= {
            **self._button(request, run),
            "verified": found,
            "badge": badges.run(run),
            "run_url": self.url(request, "change", run.pk),
        }
        title = _("%(agent)s in %(session)s") % {"agent": run.agent, "session": plain(run.session.key)}
        return self.render(request, run, title=title, status=status, template=self.chain_template, **context)

    def _button(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        return {"verify": advice.verify(), "verify_url": self.url(request, "verify", run.pk)}


def _checked(run: Run) -> tuple[Session, list[Problem]]:
    """Return what is wrong with a run's session, and the session as it was meanwhile."""
    sessions = Session.objects.using(settings.DATABASE).filter(pk=run.session_id)
    for _try in range(TRIES):
        session, problems = sessions.get(), check(run.session_id, settings.DATABASE)
        if sessions.filter(next_seq=session.next_seq, head=session.head).exists():
            break
    return session, problems


def _unread(run: Run, seq: int) -> str:
    """Return a row without its payload: what cannot be parsed cannot be masked either."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq=seq)
    texts = {"written": Cast("created_at", TextField()), "payload_text": Cast("payload", TextField())}
    row = rows.annotate(**texts).values(*COLUMNS, *texts).first()
    if row is None:
        raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
    payload = row.pop("payload_text")
    lines = [f"{name}: {value}" for name, value in row.items()]
    told = _("The payload, %(count)d characters, cannot be read, so it is not shown.")
    return "\n".join([*lines, "", told % {"count": len(payload)}])
