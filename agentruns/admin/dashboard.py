"""The figures: on the admin's index those that an operator needs first, and the costs of chosen days.

The index reads a few small queries. The costs are the tokens and the money of runs, as a page and as CSV.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from functools import partial
from statistics import median
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import Count, Exists, F, Q, QuerySet, Sum
from django.db.models.functions import TruncDate
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns.admin.base import CountOf, ReadOnlyAdmin, bounded, counted, first_id, may_view, page_url
from agentruns.admin.filters import APPROVED, SKEW, failed_lately, failures, midnight
from agentruns.admin.html import EMPTY, age, bare, duration, plain, visible
from agentruns.admin.runs.actions import is_silent
from agentruns.admin.runs.list import amount, short
from agentruns.conf import settings
from agentruns.journal import masking, outbox, policy
from agentruns.models import Approval, ApprovalRule, Control, Notification, Run, statuses
from agentruns.services import permissions, switches
from agentruns.services.runs import starting, waiting
from agentruns.utils import clock, redaction

logger = redaction.get_logger("agentruns.admin.dashboard")

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
COST_DAYS = 30
MOST_DAYS = 366
EARLIEST, LATEST = date(1970, 1, 1), date(9998, 12, 31)  # farther days overflow in some zones
COST_RUNS = 100_000  # the newest runs of the chosen days; older ones are left out
SUMS = {"runs": Count("pk"), "used": Sum("tokens"), "spent": Sum("cost")}
LINES = 200  # of the page of costs
MOST_LINES = 10_000  # of the file of costs
BY = {
    "agent": (gettext_lazy("Agent"), ["agent"]),
    "day": (gettext_lazy("Day"), ["day"]),
    "day-agent": (gettext_lazy("Day and agent"), ["day", "agent"]),
    "requester": (gettext_lazy("Requester"), ["owner_name", "owner_id"]),
    "scope": (gettext_lazy("Scope"), ["scope"]),
}
# The beginning of a formula for a spreadsheet: at the start of a text, or after a separator of cells
FORMULA = re.compile(r"(^|[;|\t\n])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])|^(?=[\t\n])")


def dashboard(site: AdminSite, request: HttpRequest) -> dict[str, Any] | None:
    """Build the front page's figures for a user; None without permission, {"failed": True} after an error."""
    sees_runs, sees_approvals = may_view(site, request, Run), may_view(site, request, Approval)
    if not sees_runs and not sees_approvals:
        return None
    runs = [(_("Runs"), _("Search runs"), page_url(site, Run))] if sees_runs else []
    approvals = [(_("Approvals"), _("Search approvals"), page_url(site, Approval))] if sees_approvals else []
    page = {"figures": [], "poll_url": page_url(site, Run, "figures"), "lists": runs + approvals}
    if may_view(site, request, ApprovalRule):
        page["rules_url"] = page_url(site, ApprovalRule)
    alias = settings.DATABASE
    # In the caller's transaction a failed query fails all later queries, unless a savepoint undoes it.
    # Outside a transaction none is begun, because on SQLite it would wait for a writer.
    try:
        with transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext():
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
    pending = visible_to_user.filter(status=statuses.PENDING).order_by("requested_at", "id")
    open_to = permissions.open_to(request.user, pending)
    figures = {"waiting": CountOf(pending, MOST), "open": CountOf(open_to, MOST)}
    rows = pending.annotate(**figures, partly=Exists(open_to.filter(PARTLY))).select_related("run")
    columns = ("title", "tool_name", "requested_at", "run__session", "run__definition")
    oldest: list[Any] = list(rows.only(*columns)[:OLDEST])
    row = oldest[0] if oldest else None
    asked, count = bounded(row.waiting if row else 0, MOST), None
    if permissions.may(request.user, "decide"):
        given: set[Any] = set()
        if row and row.partly:
            partly: Any = open_to.filter(PARTLY).values_list(*permissions.GIVEN, named=True)
            given = permissions.already_given(request.user, list(partly[:MOST]))
        count = bounded(row.open if row else 0, MOST)
        count = replace(count, number=count.number - len(given))
        page["figures"].append((count, _("waiting for you"), "waits", page_url(site, Approval, mine="yes")))
    if asked.more or asked != count:
        page["figures"].append((asked, _("waiting for a decision"), "waits", page_url(site, Approval)))
    masks = masking.masks_of((approval.run for approval in oldest), masking.MOST_ROWS, masking.MOST_READ)
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
    newest = visible_to_user.filter(pk__gte=first_id(since - PERIOD))
    decided = newest.filter(status__in=DECIDED, decided_at__gte=since).order_by("-pk")
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
    runs, figures = policy.visible_runs(request.user), page["figures"]
    for label, which, status in (
        (_("in doubt"), Q(status=Run.Status.ORPHANED), "orphaned"),
        (_("failed in the last 24 hours"), failed_lately(), "failed-lately"),
        (_("stalled"), waiting.STALLED, "stalled"),
        (_("blocked by a deploy"), waiting.blocked(), "blocked"),
    ):
        figures.append((counted(runs.filter(which), MOST), label, "bad", page_url(site, Run, status=status)))
    # By one query: the paused runs, and among them the runs held for lost rows.
    paused = runs.filter(status=Run.Status.PAUSED).annotate(is_lost=Q(blocked_reason__startswith=Run.REWOUND))
    held = list(paused.values_list("is_lost", flat=True)[: MOST + 1])
    url = page_url(site, Run, status="paused")
    figures.append((bounded(len(held), MOST), _("paused"), "waits", url))
    if machines := counted(runs.filter(status=Run.Status.WAITING), MOST):  # in no person's queue
        figures.append((machines, _("waiting for an event"), "none", page_url(site, Run, status="waiting")))
    if lost := bounded(sum(map(bool, held)), MOST):
        figures.append((lost, _("held: the database lost rows that were committed"), "bad", url))
    if left := {wait.run_id for wait in waiting.ended_in_doubt(alias, runs)}:
        url = page_url(site, Run, status="ended-in-doubt")
        figures.append((bounded(len(left), MOST), _("ended in doubt in the last 7 days"), "bad", url))
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
        figures.append((bounded(off, CONTROLS), words, "waits", url))
    unsent = Notification.objects.using(alias).filter(sent_at=None, attempts__gte=outbox.MAX_ATTEMPTS)
    if policy.is_narrowed(runs):
        unsent = unsent.filter(run_id__in=runs.values("pk"))
    if given_up := counted(unsent, MOST):
        figures.append((given_up, _("notifications given up; the log says why"), "bad", ""))
    if starting.agents_of(request.user):
        page["start_url"] = page_url(site, Run, "start")
    if permissions.may(request.user, "switch"):
        page["switches_url"] = page_url(site, Run, "switches")
    page["worker"] = {"seen": age(seen) if seen else "", "is_silent": is_silent(seen)}
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
    by_day: dict[date, list[Any]] = defaultdict(list)
    by_agent: dict[str, list[Any]] = defaultdict(list)
    for run in week:
        by_day[timezone.localdate(run.created_at)].append(run)
        by_agent[run.agent].append(run)
    page["most"] = max(map(len, by_day.values()), default=0)

    def line(name: str, runs: list[Any], **query: str) -> dict[str, Any]:
        """Describe the runs that the list selects by `query`; the cost is "" if it is known of no run."""
        ended = [run.updated_at - run.created_at for run in runs if run.status in Run.ENDED]
        costs = [run.cost for run in runs if run.cost is not None]
        return {
            "name": name,
            "runs": len(runs),
            "failed": sum(run.status == Run.Status.FAILED for run in runs),
            "median": duration(median(ended)) if ended else EMPTY,
            "tokens": short(sum(run.tokens for run in runs)),
            "cost": amount(sum(costs, Decimal()) if costs else None),
            "url": page_url(site, Run, **query),
            "failed_url": page_url(site, Run, status="failed", **query),
        }

    page["cost"] = line("", week)["cost"]
    page["days"] = [
        line(date_format(day, "MONTH_DAY_FORMAT"), by_day[day], started_from=f"{day}", started_to=f"{day}")
        for day in (today - timedelta(days=number) for number in range(DAYS))
    ]
    most_first = sorted(by_agent.items(), key=lambda item: (-len(item[1]), item[0]))
    page["agents"] = [
        line(plain(agent), its, agent=agent, started_from=f"{first}") for agent, its in most_first[:TOOLS]
    ]


def runs_of_days(runs: QuerySet[Run], first: date, last: date, most: int) -> QuerySet[Run]:
    """Select the newest `most` of the runs that were started from `first` to `last`, each run once."""
    start, end = midnight(first), midnight(last + timedelta(days=1))
    some = runs.filter(created_at__gte=start, created_at__lt=end)
    some = some.filter(pk__gte=first_id(start - SKEW), pk__lt=first_id(end + SKEW))
    return Run.objects.using(settings.DATABASE).filter(pk__in=some.order_by("-pk").values("pk")[:most])


def figures_view(model_admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Render the present figures for an open front page; raises PermissionDenied."""
    page = dashboard(model_admin.admin_site, request)
    if page is None:
        raise PermissionDenied
    return render(request, "agentruns/admin/dashboard.html", {"dashboard": page})


class CostsForm(forms.Form):
    """The form that chooses the days and the grouping; by default the last 30 days, by agent."""

    by = forms.ChoiceField(
        label=gettext_lazy("by"),
        choices=[(key, label) for key, (label, _columns) in BY.items()],
        error_messages={"invalid_choice": gettext_lazy("Choose one of the groupings.")},
    )
    first = forms.DateField(label=gettext_lazy("from"), widget=forms.DateInput({"type": "date"}))
    last = forms.DateField(label=gettext_lazy("to"), widget=forms.DateInput({"type": "date"}))

    def __init__(self, data: Any) -> None:
        today = timezone.localdate(clock.now(settings.DATABASE))
        given = {"by": "agent", "first": today - timedelta(days=COST_DAYS - 1), "last": today}
        super().__init__({name: data.get(name) or value for name, value in given.items()})

    def clean(self) -> dict[str, Any]:
        """Refuse days in the wrong order, more than MOST_DAYS, before EARLIEST or after LATEST."""
        given = self.cleaned_data
        first, last = given.get("first", EARLIEST), given.get("last", LATEST)
        is_long = len({"first", "last"} & given.keys()) == 2 and (last - first).days >= MOST_DAYS
        if not EARLIEST <= first <= last <= LATEST or is_long:
            text = _("Choose from 1 to %(count)d days, the first one first.") % {"count": MOST_DAYS}
            raise forms.ValidationError(text)
        return given


def costs_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show tokens and costs of the runs that the user may see, for the chosen days and grouping.

    Counts only the newest COST_RUNS of these runs.
    """
    form = CostsForm(request.GET)
    context: dict[str, Any] = {"form": form, "currency": settings.CURRENCY}
    if form.is_valid():
        first, last, by = (form.cleaned_data[name] for name in ("first", "last", "by"))
        runs = runs_of_days(policy.visible_runs(request.user), first, last, COST_RUNS)
        total = runs.aggregate(**SUMS)
        rows = list(grouped(runs, BY[by][1])[: LINES + 1])
        sizes = [float(row["spent"] or 0) if total["spent"] else row["used"] for row in rows]
        listed = partial(costs_line, listed=admin.url(request, "changelist"))
        context |= {
            "label": BY[by][0],
            "lines": [
                {**listed(row, started_from=first, started_to=last), "size": size}
                for row, size in zip(rows[:LINES], sizes, strict=False)
            ],
            "most": max(sizes, default=0),
            "total": costs_line(total),
            "is_cut": total["runs"] == COST_RUNS or len(rows) > LINES,
            "csv_url": admin.url(request, "csv", first=first, last=last),
        }
    status = 200 if form.is_valid() else 400
    return admin.render(request, None, title=_("Costs"), status=status, template="costs", **context)


def csv_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Send tokens and costs by day, agent, requester and scope as CSV: titles and at most MOST_LINES lines.

    Counts only the newest COST_RUNS runs of the days. Status 400 for an invalid form.
    """
    form = CostsForm(request.GET)
    if not form.is_valid():
        return HttpResponse(form.errors.as_text(), "text/plain", 400)
    first, last = form.cleaned_data["first"], form.cleaned_data["last"]
    name = f'attachment; filename="costs-{first}-{last}.csv"'
    headers = {"Content-Disposition": name, "X-Content-Type-Options": "nosniff"}
    response = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    columns, writer = ["day", "agent", "owner_name", "scope"], csv.writer(response)
    currency = [safe_cell(settings.CURRENCY)] if settings.CURRENCY else []
    titles = ["day", "agent", "requester", "scope", "runs", "tokens", "cost", "currency"]
    writer.writerow(titles if currency else titles[:-1])
    runs = runs_of_days(policy.visible_runs(request.user), first, last, COST_RUNS)
    for row in grouped(runs, columns)[:MOST_LINES]:
        cost = "" if row["spent"] is None else format(row["spent"].normalize(), "f")
        row["owner_name"] = row["owner_name"] or _("the program")
        names = (safe_cell(row[column]) for column in columns)
        writer.writerow([*names, row["runs"], row["used"], cost, *currency])
    return response


def safe_cell(value: object) -> str:
    """Format a value as `bare` does, with an apostrophe wherever a spreadsheet would read a formula."""
    return FORMULA.sub(r"\1'", bare(value))


def grouped(runs: QuerySet[Run], columns: list[str]) -> Any:
    """Sum runs, tokens and cost by `columns`, with the newest day first if there are days, then by cost."""
    order: list[Any] = ["-day"] if "day" in columns else []
    order += [F("spent").desc(nulls_last=True), "-used", *columns]
    return runs.annotate(day=TruncDate("created_at")).values(*columns).annotate(**SUMS).order_by(*order)


def costs_line(row: dict[str, Any], listed: str = "", **query: Any) -> dict[str, Any]:
    """Format the name and the figures of a line, and build the URL of the list of its runs.

    `query` selects the days of the page. The URL is "" if no filter of the list selects the runs.
    """
    absent = {"owner_name": _("the program"), "scope": EMPTY}
    names = [row[each] or absent.get(each, "") for each in ("agent", "owner_name", "scope") if each in row]
    if "day" in row:
        query, names = dict.fromkeys(query, row["day"]), [date_format(row["day"]), *names]
    columns = {"agent": "agent", "requester": "owner_id"}
    query |= {name: row[column] for name, column in columns.items() if column in row}
    is_found = "scope" not in row and query.get("requester", "") is not None
    return {
        "name": ", ".join(map(plain, names)),
        "url": f"{listed}?{urlencode(query)}" if is_found else "",
        "runs": bounded(row["runs"], COST_RUNS),
        "tokens": short(row["used"] or 0),
        "cost": amount(row["spent"]),
    }
