"""The figures on the index of the admin that an operator needs first, each by one small query."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db import connections, transaction
from django.db.models import Exists, F, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from agentruns.admin.base import Bounded, CountOf, bounded, counted, first_id, may_view
from agentruns.admin.filters import failed_lately
from agentruns.admin.html import age, plain, visible, words
from agentruns.admin.runs.actions import SILENT_AFTER
from agentruns.conf import settings
from agentruns.journal import outbox, policy
from agentruns.journal.masking import masked_approvals
from agentruns.models import Approval, Notification, Run
from agentruns.models.querysets import PENDING
from agentruns.services import permissions
from agentruns.services.waiting import STALLED, sweeper_seen
from agentruns.utils import clock
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.admin.dashboard")

MOST = 1000  # rows that any of the figures looks at
PERIOD = timedelta(days=30)
TOOLS = 15
APPROVED = (Approval.Status.APPROVED, Approval.Status.CONSUMED)
PARTLY = Q(approved_count__gt=0)
DECIDED = (*APPROVED, Approval.Status.DENIED, Approval.Status.ANSWERED)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, what it counts, and where these are listed."""

    count: Bounded
    label: str
    tone: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions on one tool's calls."""

    tool: str
    url: str
    count: int
    approved: int
    time: str

    @property
    def rate(self) -> str:
        """The share that was approved, in percent."""
        return f"{100 * self.approved // self.count} %"


@dataclass(slots=True)
class Dashboard:
    """The figures that this user may see; `failed` where they could not be read."""

    figures: list[Figure]
    oldest: dict[str, Any] | None = None  # the approval that waits longest
    sweeper: dict[str, Any] | None = None  # when a worker was last seen
    decisions: list[Decisions] | None = None
    more_tools: int = 0
    failed: bool = False


def dashboard(site: AdminSite, request: HttpRequest) -> Dashboard | None:
    """Return what a user may see on a site, None if that is nothing; a failure is logged and shown."""
    sees_runs, sees_approvals = may_view(site, request, Run), may_view(site, request, Approval)
    if not sees_runs and not sees_approvals:
        return None
    alias, found = settings.DATABASE, Dashboard([])
    # In somebody's transaction a failed query fails all later ones, unless it is undone to a savepoint. And
    # none of our own: on SQLite it would wait for whoever writes.
    inside = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if inside else nullcontext():
            if sees_approvals:
                _approvals(site, request, found)
                _decisions(site, request, found)
            if sees_runs:
                _runs(alias, site, request, found)
    except Exception:  # the index is the project's, whatever is wrong with what we add to it
        logger.exception("The dashboard could not be read")
        return Dashboard([], failed=True)
    return found


def _approvals(site: AdminSite, request: HttpRequest, found: Dashboard) -> None:
    visible_to_user = policy.visible_approvals(request.user)
    pending = visible_to_user.filter(status=PENDING).order_by("requested_at", "id")
    open_to = permissions.open_to(request.user, pending)
    figures = {"waiting": CountOf(pending, MOST), "open": CountOf(open_to, MOST)}
    rows = pending.annotate(**figures, partly=Exists(open_to.filter(PARTLY))).select_related("run")
    row: Any = rows.only("title", "tool_name", "requested_at", "run__session", "run__definition").first()
    if permissions.may(request.user, "decide"):
        count = _mine(request.user, open_to, row) if row else bounded(0, MOST)
        found.figures.append(_figure(count, _("waiting for you"), "waits", _list(site, Approval, mine="yes")))
    waiting = bounded(row.waiting if row else 0, MOST)
    found.figures.append(_figure(waiting, _("waiting for a decision"), "waits", _list(site, Approval)))
    if row:
        name = "admin:agentruns_approval_change"
        url = reverse(name, args=[row.pk], current_app=site.name)
        [oldest] = masked_approvals([row], MOST)
        found.oldest = {"title": visible(oldest.title), "url": url, "age": age(row.requested_at)}


def _mine(user: Any, open_to: QuerySet[Any], row: Any) -> Bounded:
    more = row.open > MOST
    given: set[Any] = set()
    if row.partly:
        partly: Any = open_to.filter(PARTLY).values_list(*permissions.GIVEN, named=True)
        given = permissions.already_given(user, list(partly[:MOST]))
    return Bounded(min(row.open, MOST) - len(given), more)


def _runs(alias: str, site: AdminSite, request: HttpRequest, found: Dashboard) -> None:
    runs = policy.visible_runs(request.user)
    for label, tone, which, status in (
        (_("in doubt (orphaned)"), "bad", Q(status=Run.Status.ORPHANED), "orphaned"),
        (_("stalled"), "bad", STALLED, "stalled"),
        (_("paused"), "waits", Q(status=Run.Status.PAUSED), "paused"),
        (_("failed in the last 24 hours"), "bad", failed_lately(), "failed-lately"),
    ):
        count = counted(runs.filter(which), MOST)
        found.figures.append(_figure(count, label, tone, _list(site, Run, status=status)))
    unsent = Notification.objects.using(alias).filter(sent_at=None, attempts__gte=outbox.MAX_ATTEMPTS)
    if policy.is_narrowed(runs):
        unsent = unsent.filter(run_id__in=runs.values("pk"))
    if given_up := counted(unsent, MOST):
        found.figures.append(_figure(given_up, _("notifications given up; the log says why"), "bad", ""))
    seen = sweeper_seen(alias)
    silent = seen is None or clock.now(settings.DATABASE) - seen > SILENT_AFTER
    found.sweeper = {"seen": age(seen) if seen else "", "is_silent": silent}


def _decisions(site: AdminSite, request: HttpRequest, found: Dashboard) -> None:
    """Look at the newest by their ids, which are indexed: asked within twice the period, decided in it."""
    since = clock.now(settings.DATABASE) - PERIOD
    asked = policy.visible_approvals(request.user).filter(pk__gte=first_id(since - PERIOD))
    rows = asked.filter(status__in=DECIDED, decided_at__gte=since).order_by("-pk")
    fields: Any = rows.values_list("tool_name", "status", F("decided_at") - F("requested_at"))
    by_tool: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for tool, status, time in fields[:MOST]:
        by_tool[tool].append((status, time.total_seconds()))
    most_first = sorted(by_tool.items(), key=lambda item: (-len(item[1]), item[0]))
    found.decisions = list(_summaries(site, most_first[:TOOLS]))
    found.more_tools = len(most_first) - len(found.decisions)


def _summaries(site: AdminSite, tools: list[tuple[str, list[tuple[str, float]]]]) -> Iterator[Decisions]:
    now = clock.now(settings.DATABASE)
    for tool, given in tools:
        typical = timedelta(seconds=median(seconds for _status, seconds in given))
        yield Decisions(
            tool=plain(tool),
            url=_list(site, Approval, status="all", tool=tool),
            count=len(given),
            approved=sum(status in APPROVED for status, _seconds in given),
            time=words(now - max(typical, timedelta())),
        )


def _figure(count: Bounded, label: str, tone: str, url: str) -> Figure:
    return Figure(count, label, tone if count else "none", url)


def _list(site: AdminSite, model: Any, **query: str) -> str:
    url = reverse(f"admin:agentruns_{model._meta.model_name}_changelist", current_app=site.name)
    return f"{url}?{urlencode(query)}" if query else url
