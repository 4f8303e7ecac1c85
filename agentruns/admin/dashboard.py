"""The figures on the admin's index that an operator needs first, read by a few small queries."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from datetime import date, timedelta
from decimal import Decimal
from statistics import median
from typing import Any

from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import Exists, F, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from agentruns.admin.base import (
    Bounded,
    CountOf,
    ReadOnlyAdmin,
    bounded,
    counted,
    first_id,
    may_view,
    page_url,
)
from agentruns.admin.filters import APPROVED, SKEW, failed_lately, failures, midnight
from agentruns.admin.html import EMPTY, age, duration, plain, visible
from agentruns.admin.runs.actions import SILENT_AFTER
from agentruns.admin.runs.list import amount, short
from agentruns.conf import settings
from agentruns.journal import masking, outbox, policy
from agentruns.journal.masking import masks_of
from agentruns.models import Approval, Control, Notification, Run
from agentruns.models.querysets import PENDING
from agentruns.services import permissions, switches
from agentruns.services.runs import starting
from agentruns.services.runs.blocked import blocked
from agentruns.services.runs.waiting import STALLED, ended_in_doubt
from agentruns.utils import clock
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.admin.dashboard")

MOST = 1000  # rows that each figure reads at most
PERIOD = timedelta(days=30)
DAYS = 7  # of the figures by day and by agent
RUNS = 5_000  # newest runs of these days that are read
OLDEST = 5
CAUSES = 10
CONTROLS = 100
TOOLS = 15  # or agents
PARTLY = Q(approved_count__gt=0)
DECIDED = (*APPROVED, Approval.Status.DENIED, Approval.Status.ANSWERED)


def dashboard(site: AdminSite, request: HttpRequest) -> dict[str, Any] | None:
    """Build the front page's figures for a user; None without permission, {"failed": True} after an error."""
    sees_runs, sees_approvals = may_view(site, request, Run), may_view(site, request, Approval)
    if not sees_runs and not sees_approvals:
        return None
    runs = [(_("Runs"), _("Search runs"), page_url(site, Run))] if sees_runs else []
    approvals = [(_("Approvals"), _("Search approvals"), page_url(site, Approval))] if sees_approvals else []
    page = {"figures": [], "poll_url": page_url(site, Run, "figures"), "lists": runs + approvals}
    alias = settings.DATABASE
    # In the caller's transaction a failed query fails all later queries, unless a savepoint undoes it.
    # Outside a transaction none is begun, because on SQLite it would wait for a writer.
    inside = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if inside else nullcontext():
            if sees_approvals:
                _approvals(site, request, page)
            if sees_runs:
                _runs(alias, site, request, page)
    except Exception:  # an error of ours must not break the project's index page
        logger.exception("The dashboard could not be read")
        return {"failed": True}
    return page


def _approvals(site: AdminSite, request: HttpRequest, page: dict[str, Any]) -> None:
    """Add to the page the approvals that wait, the oldest of them, and recent decisions by tool."""
    visible_to_user = policy.visible_approvals(request.user)
    pending = visible_to_user.filter(status=PENDING).order_by("requested_at", "id")
    open_to = permissions.open_to(request.user, pending)
    figures = {"waiting": CountOf(pending, MOST), "open": CountOf(open_to, MOST)}
    rows = pending.annotate(**figures, partly=Exists(open_to.filter(PARTLY))).select_related("run")
    columns = ("title", "tool_name", "requested_at", "run__session", "run__definition")
    oldest: list[Any] = list(rows.only(*columns)[:OLDEST])
    row = oldest[0] if oldest else None
    waiting, count = bounded(row.waiting if row else 0, MOST), None
    if permissions.may(request.user, "decide"):
        given: set[Any] = set()
        if row and row.partly:
            partly: Any = open_to.filter(PARTLY).values_list(*permissions.GIVEN, named=True)
            given = permissions.already_given(request.user, list(partly[:MOST]))
        number = row.open if row else 0
        count = Bounded(min(number, MOST) - len(given), number > MOST)
        _figure(page, count, _("waiting for you"), "waits", page_url(site, Approval, mine="yes"))
    if waiting.more or waiting != count:
        _figure(page, waiting, _("waiting for a decision"), "waits", page_url(site, Approval))
    masks = masks_of((approval.run for approval in oldest), masking.MOST_ROWS, masking.MOST_READ)
    page["waiting"] = [
        {
            "title": visible(masks[approval.run.session_id].approval(approval).title),
            "url": page_url(site, Approval, "change", approval.pk),
            "age": age(approval.requested_at),
        }
        for approval in oldest
    ]
    # The decisions of the last 30 days by tool, of the newest MOST approvals of the last 60 days.
    since = clock.now(settings.DATABASE) - PERIOD
    asked = visible_to_user.filter(pk__gte=first_id(since - PERIOD))
    decided = asked.filter(status__in=DECIDED, decided_at__gte=since).order_by("-pk")
    fields: Any = decided.values_list("tool_name", "status", F("decided_at") - F("requested_at"))
    by_tool: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for tool, status, time in fields[:MOST]:
        by_tool[tool].append((status, time.total_seconds()))
    most_first = sorted(by_tool.items(), key=lambda item: (-len(item[1]), item[0]))
    page["decisions"] = [
        {
            "tool": plain(tool),
            "url": page_url(site, Approval, status="all", tool=tool),
            "count": len(given),
            "rate": f"{100 * sum(status in APPROVED for status, _seconds in given) // len(given)} %",
            "time": duration(timedelta(seconds=median(max(seconds, 0) for _status, seconds in given))),
        }
        for tool, given in most_first[:TOOLS]
    ]
    page["more_tools"] = max(len(most_first) - TOOLS, 0)


def _runs(alias: str, site: AdminSite, request: HttpRequest, page: dict[str, Any]) -> None:
    runs = policy.visible_runs(request.user)
    for label, tone, which, status in (
        (_("in doubt"), "bad", Q(status=Run.Status.ORPHANED), "orphaned"),
        (_("failed in the last 24 hours"), "bad", failed_lately(), "failed-lately"),
        (_("stalled"), "bad", STALLED, "stalled"),
        (_("blocked by a deploy"), "bad", blocked(), "blocked"),
    ):
        count = counted(runs.filter(which), MOST)
        _figure(page, count, label, tone, page_url(site, Run, status=status))
    # By one query: the paused runs, and among them the runs held for lost rows.
    paused = runs.filter(status=Run.Status.PAUSED).annotate(is_lost=Q(blocked_reason__startswith=Run.REWOUND))
    held = list(paused.values_list("is_lost", flat=True)[: MOST + 1])
    url = page_url(site, Run, status="paused")
    _figure(page, bounded(len(held), MOST), _("paused"), "waits", url)
    if lost := sum(map(bool, held)):
        _figure(page, bounded(lost, MOST), _("held: the database lost rows that were committed"), "bad", url)
    if left := {wait.run_id for wait in ended_in_doubt(alias, runs)}:
        url = page_url(site, Run, status="ended-in-doubt")
        _figure(page, bounded(len(left), MOST), _("ended in doubt in the last 7 days"), "bad", url)
    # By one query: how many agents and tools are off, and when a worker's sweep was last seen. The few
    # sweepers come first, so that the limit never cuts them off.
    controls = Control.objects.using(alias)
    controls = controls.sweepers() | controls.switches()
    columns = controls.annotate(is_off=Q(name__startswith="off:")).values_list("is_off", "seen_at")
    known = list(columns.order_by("is_off", "-seen_at")[: 2 * CONTROLS])
    seen = next((seen_at for is_off, seen_at in known if not is_off), None)
    off = sum(bool(is_off) for is_off, _seen in known)
    if off and permissions.hides(request.user) and policy.is_narrowed(runs):
        off = len(switches.switched_off(request.user))
    if off:
        words = ngettext("agent or tool switched off", "agents and tools switched off", off)
        url = page_url(site, Run, "switches") if permissions.may(request.user, "switch") else ""
        _figure(page, bounded(off, CONTROLS), words, "waits", url)
    unsent = Notification.objects.using(alias).filter(sent_at=None, attempts__gte=outbox.MAX_ATTEMPTS)
    if policy.is_narrowed(runs):
        unsent = unsent.filter(run_id__in=runs.values("pk"))
    if given_up := counted(unsent, MOST):
        _figure(page, given_up, _("notifications given up; the log says why"), "bad", "")
    silent = seen is None or clock.now(settings.DATABASE) - seen > SILENT_AFTER
    if starting.agents_of(request.user):
        page["start_url"] = page_url(site, Run, "start")
    if permissions.may(request.user, "switch"):
        page["switches_url"] = page_url(site, Run, "switches")
    page["worker"] = {"seen": age(seen) if seen else "", "is_silent": silent}
    _week(site, runs, page)
    grouped = sorted(failures(request.user).items(), key=lambda item: -len(item[1][1]))
    page["failures"] = [
        {
            "text": visible(text),
            "count": len(failed),
            "agents": ", ".join(dict.fromkeys(plain(run.agent) for run in failed)),
            "age": age(failed[0].updated_at),
            "url": page_url(site, Run, cause=key),
        }
        for key, (text, failed) in grouped[:CAUSES]
    ]


def _week(site: AdminSite, runs: QuerySet[Run], page: dict[str, Any]) -> None:
    """Add to the page counts and costs of the newest RUNS runs of the last 7 days, by day and by agent."""
    today = timezone.localdate(clock.now(settings.DATABASE))
    first = today - timedelta(days=DAYS - 1)
    page["costs_url"] = page_url(site, Run, "costs", by="agent", first=first, last=today)
    columns = ("agent", "status", "created_at", "updated_at", "tokens", "cost")
    week: Any = list(runs_of_days(runs, first, today, RUNS + 1).values_list(*columns, named=True))
    page["looked_at"], week = bounded(len(week), RUNS), week[:RUNS]
    days = [first + timedelta(days=number) for number in range(DAYS)]
    by_day: dict[date, list[Any]] = {day: [] for day in days}
    by_agent: dict[str, list[Any]] = defaultdict(list)
    for run in week:
        by_day.setdefault(timezone.localdate(run.created_at), []).append(run)
        by_agent[run.agent].append(run)
    most = max(map(len, by_day.values()))
    page["days"] = [
        {
            "label": date_format(day, "MONTH_DAY_FORMAT"),
            "bar": bar(len(by_day[day]), _failed(by_day[day]), most),
            **_counts(site, by_day[day], started_from=f"{day}", started_to=f"{day}"),
        }
        for day in reversed(days)
    ]
    page["cost"] = amount(_cost(week))
    most_first = sorted(by_agent.items(), key=lambda item: (-len(item[1]), item[0]))
    page["agents"] = []
    for agent, its in most_first[:TOOLS]:
        ended = [run.updated_at - run.created_at for run in its if run.status in Run.ENDED]
        line = {
            "agent": plain(agent),
            "median": duration(median(ended)) if ended else EMPTY,
            "tokens": short(sum(run.tokens for run in its)),
            "cost": amount(_cost(its)),
        }
        page["agents"].append({**line, **_counts(site, its, agent=agent, started_from=f"{first}")})


def runs_of_days(runs: QuerySet[Run], first: date, last: date, most: int) -> QuerySet[Run]:
    """Select the newest `most` of the runs that were started from `first` to `last`, each run once."""
    start, end = midnight(first), midnight(last + timedelta(days=1))
    some = runs.filter(created_at__gte=start, created_at__lt=end)
    some = some.filter(pk__gte=first_id(start - SKEW), pk__lt=first_id(end + SKEW))
    return Run.objects.using(settings.DATABASE).filter(pk__in=some.order_by("-pk").values("pk")[:most])


def _counts(site: AdminSite, its: list[Any], **query: str) -> dict[str, Any]:
    urls = {"url": page_url(site, Run, **query), "failed_url": page_url(site, Run, status="failed", **query)}
    return {"runs": len(its), "failed": _failed(its), **urls}


def _failed(runs: list[Any]) -> int:
    return sum(run.status == Run.Status.FAILED for run in runs)


def _cost(runs: list[Any]) -> Decimal | None:
    """Add up the costs of the runs; None if no run has a known cost."""
    known = [run.cost for run in runs if run.cost is not None]
    return sum(known, Decimal()) if known else None


def bar(all_of_it: float, bad: float, most: float) -> SafeString:
    """Draw an SVG bar of length `all_of_it`, with `bad` marked at its beginning; `most` is the full width."""
    widths = [f"{100 * each / most:.1f}" if most else "0" for each in (all_of_it, bad)]
    return format_html(
        '<svg class="ar-stroke" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="ar-stroke-all" width="{}" height="10"/>'
        '<rect class="ar-stroke-bad" width="{}" height="10"/></svg>',
        *widths,
    )


def figures_view(model_admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Render the present figures for an open front page; raises PermissionDenied."""
    page = dashboard(model_admin.admin_site, request)
    if page is None:
        raise PermissionDenied
    return render(request, "agentruns/admin/dashboard.html", {"dashboard": page})


def _figure(page: dict[str, Any], count: Bounded, label: str, tone: str, url: str) -> None:
    figure = {"count": count, "label": label, "tone": tone if count else "none", "url": url}
    page["figures"].append(figure)
