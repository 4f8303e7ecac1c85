"""For auditors: whether the journal of a run is what was written, and the downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.exceptions import PermissionDenied
from django.db.models import TextField
from django.db.models.functions import Cast
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.base import CHANNEL
from agentruns.admin.html import EMPTY, Fact, age, approval_badge, exact, plain, run_badge, visible
from agentruns.admin.runs import page
from agentruns.admin.runs.actions import UNREADABLE, Action, Situation, refused
from agentruns.admin.runs.list import task_title
from agentruns.admin.runs.steps import mask_for
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, PayloadError, PermissionDeniedError
from agentruns.journal.policy import visible_approvals, visible_runs
from agentruns.journal.verify import Problem, check
from agentruns.models import Approval, Message, Run, Session
from agentruns.services import permissions
from agentruns.services.transfer import (
    Content,
    download,
    download_export,
    find_content,
    find_file,
    read_content,
)  # fmt: skip
from agentruns.utils import clock

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

TRIES = 10
PROBLEMS = 20  # on the page
COLUMNS = ("seq", "kind", "call_id", "tool_name", "attempt", "epoch", "prev_hash", "hash")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check of a session's journal, and the head that it was checked against."""

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
        """True if nothing is wrong."""
        return not self.problems


def buttons(admin: RunAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Return the buttons that verify and export, for the page of a run."""
    run = situation.run
    return {**_verify(admin, request, run), "export_url": admin.url(request, "export", run.pk)}


def verify_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Read the whole journal of the run's session and say whether it is intact. Stores nothing."""
    return chain_page(admin, request, run, finding(admin, request, run))


def row_view(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Return one journal row; of one that cannot be read, all but its payload."""
    try:
        return page.row_view(admin, request, run, seq)
    except UNREADABLE:
        if not check(run.session_id, settings.DATABASE):
            raise
    return page.as_text(_unread(run, seq))


def export_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponseBase:
    """Stream the run for an auditor, redacted, and log that it left."""
    try:
        export = download_export(request, run)
    except PermissionDeniedError as error:
        return refused(admin, request, run, error)
    admin.log_change(request, run, _("Exported for an auditor."))
    return export


def content_view(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponseBase:
    """Stream what a row holds only the beginning of; what is guarded only when asked for by POST."""
    found = partial(find_content, run, seq if seq < page.LARGEST else 0)
    return _content_view(admin, request, run, seq, found)


def file_view(admin: RunAdmin, request: HttpRequest, run: Run, sha256: str) -> HttpResponseBase:
    """Stream a picture or document of a row, as `content_view`; pictures to be shown on a page."""
    return _content_view(admin, request, run, 0, partial(find_file, run, sha256))


def _content_view(
    admin: RunAdmin, request: HttpRequest, run: Run, seq: int, find: Callable[[], Content]
) -> HttpResponseBase:
    try:
        content = find()
    except DurableRunNotFoundError as error:
        raise Http404(str(error)) from error
    except PayloadError as error:
        return _content_page(admin, request, run, seq, None, status=409, refusal=plain(error))
    seq = content.stored.seq
    if content.guarded and request.method != "POST":
        return _content_page(admin, request, run, seq, content)
    if content.guarded and not permissions.may_reveal(request.user, run):
        raise PermissionDenied
    try:
        chunks = read_content(content, request.user, door=CHANNEL)
    except PayloadError as error:
        return _content_page(admin, request, run, seq, content, status=409, refusal=plain(error))
    if content.guarded:
        admin.log_change(request, run, _("Downloaded the true content of row %d.") % seq)
    return download(request, content, chunks)


def damaged_page(
    admin: RunAdmin, request: HttpRequest, run: Run, found: Finding, *, status: int, **context: Any
) -> HttpResponse:
    """Return the page of a run whose journal cannot be read: what is known without it."""
    approvals = visible_approvals(request.user).filter(run_id=run.pk).defer("arguments")
    mask = mask_for(run)
    run = mask.run(run)
    known = {
        "unreadable": True,
        "facts": page.facts(run),
        "bodies": page.texts(run),
        "approvals": [
            {
                "title": visible(approval.title),
                "badge": approval_badge(approval),
                "by": visible(approval.decided_by_name or EMPTY),
                "asked": age(approval.requested_at),
                "url": admin.other_page(request, Approval, approval.pk),
            }
            for approval in map(mask.approval, reversed(approvals.order_by("-requested_at")[: page.PAGE]))
        ],
    }
    return chain_page(admin, request, run, found, status=status, **known, **context)


def chain_page(
    admin: RunAdmin, request: HttpRequest, run: Run, found: Finding, *, status: int = 200, **context: Any
) -> HttpResponse:
    """Return the result of a check as a page."""
    context |= {
        **_verify(admin, request, run),
        "verified": found,
        "badge": run_badge(run),
    }
    template = "agentruns/admin/run_chain.html"
    return admin.render(request, run, title=task_title(run), status=status, template=template, **context)


def finding(admin: RunAdmin, request: HttpRequest, run: Run) -> Finding:
    """Check the journal of a run's session."""
    session, problems = _checked(run)
    bad = next((each.seq for each in problems if each.seq is not None), None)
    rows = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id, seq=bad or 0)
    of = rows.filter(run__in=visible_runs(request.user)).values_list("run_id", flat=True).first()
    return Finding(
        problems=[visible(each.what) for each in problems[:PROBLEMS]],
        left_out=max(0, len(problems) - PROBLEMS),
        is_chained=bad is None,
        at=exact(clock.now(settings.DATABASE)),
        seq=session.next_seq - 1,
        head=session.head,
        bad_seq=bad,
        row_url=admin.url(request, "row", of, bad) if of else "",
    )


def _verify(admin: RunAdmin, request: HttpRequest, run: Run) -> dict[str, Any]:
    effect = [
        _("Every row of the session's journal is checked: its hash, its place, and what belongs to it."),
        _("Then the runs and approvals shown here are compared with the journal."),
        _("Nothing is changed and nothing is stored. A long journal takes a while."),
    ]
    return {"verify": Action(effect), "verify_url": admin.url(request, "verify", run.pk)}


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
    parts = {f"{name}_text": Cast(name, TextField()) for name in ("facts", "content")}
    texts = {"written": Cast("created_at", TextField()), **parts}
    row = rows.annotate(**texts).values(*COLUMNS, *texts).first()
    if row is None:
        raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
    count = sum(len(row.pop(name) or "") for name in parts)
    lines = [f"{name}: {value}" for name, value in row.items()]
    note = _("The content, %(count)d characters, cannot be read, so it is not shown.")
    return "\n".join([*lines, "", note % {"count": count}])


def _content_page(
    admin: RunAdmin,
    request: HttpRequest,
    run: Run,
    seq: int,
    content: Content | None,
    *,
    status: int = 200,
    refusal: str = "",
) -> HttpResponse:
    context = {
        "seq": str(seq),
        "content_url": request.get_full_path(),
        "facts": _facts(content) if content else [],
        "guarded": content is not None and content.guarded,
        "may_reveal": permissions.may_reveal(request.user, run),
        "refusal": refusal,
    }
    title, template = _("The content of row %d") % seq, "agentruns/admin/content.html"
    return admin.render(request, run, title=title, status=status, template=template, **context)


def _facts(content: Content) -> list[Fact]:
    stored = content.stored
    # By its hash a file of which the beginning is shown could be guessed.
    sha256 = visible("" if content.guarded else stored.sha256)
    facts = [
        Fact(_("File"), format_html('<code class="ar-copy">{}</code>', visible(stored.name or EMPTY))),
        Fact(_("Storage"), visible(settings.PAYLOAD_STORAGE)),
        Fact(_("Size"), filesizeformat(stored.size), _("%d bytes") % stored.size),
        Fact(_("SHA-256"), format_html('<code class="ar-copy">{}</code>', sha256)) if sha256 else None,
    ]
    return [fact for fact in facts if fact]
