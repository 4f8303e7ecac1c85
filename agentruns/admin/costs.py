"""Costs: the tokens and the money of runs by agent, day, requester or scope, as a page and as CSV."""

from __future__ import annotations

import csv
import re
from datetime import date, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.db.models import Count, F, QuerySet, Sum
from django.db.models.functions import TruncDate
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, bounded
from agentruns.admin.dashboard import bar, runs_of_days
from agentruns.admin.html import EMPTY, bare, plain
from agentruns.admin.runs.list import amount, short
from agentruns.conf import settings
from agentruns.journal.policy import visible_runs
from agentruns.models import Run
from agentruns.utils import clock

DAYS = 30
MOST_DAYS = 366
EARLIEST, LATEST = date(1970, 1, 1), date(9998, 12, 31)  # farther days overflow in some zones
RUNS = 100_000  # the newest runs of the chosen days; older ones are left out
LINES = 200  # of the page
MOST_LINES = 10_000  # of the file
BY = {
    "agent": (gettext_lazy("Agent"), ["agent"]),
    "day": (gettext_lazy("Day"), ["day"]),
    "day-agent": (gettext_lazy("Day and agent"), ["day", "agent"]),
    "requester": (gettext_lazy("Requester"), ["owner_name", "owner_id"]),
    "scope": (gettext_lazy("Scope"), ["scope"]),
}
# The beginning of a formula for a spreadsheet: at the start of a text, or after a separator of cells
FORMULA = re.compile(r"(^|[;|\t\n])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])|^(?=[\t\n])")


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
        given = {"by": "agent", "first": today - timedelta(days=DAYS - 1), "last": today}
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

    Counts only the newest RUNS of these runs.
    """
    form = CostsForm(request.GET)
    context: dict[str, Any] = {"form": form, "currency": settings.CURRENCY}
    if form.is_valid():
        first, last, by = (form.cleaned_data[name] for name in ("first", "last", "by"))
        runs = runs_of_days(visible_runs(request.user), first, last, RUNS)
        total = runs.aggregate(runs=Count("pk"), used=Sum("tokens"), spent=Sum("cost"))
        rows = list(_grouped(runs, BY[by][1])[: LINES + 1])
        sizes = [float(row["spent"] or 0) if total["spent"] else row["used"] for row in rows]
        days, listed = {"started_from": f"{first}", "started_to": f"{last}"}, admin.url(request, "changelist")
        context |= {
            "label": BY[by][0],
            "lines": [
                {**_named(row, days, listed), **_figures(row), "bar": bar(size, 0, max(sizes))}
                for row, size in zip(rows[:LINES], sizes, strict=False)
            ],
            "total": _figures(total),
            "is_cut": total["runs"] == RUNS or len(rows) > LINES,
            "csv_url": admin.url(request, "csv", first=first, last=last),
        }
    status = 200 if form.is_valid() else 400
    return admin.render(request, None, title=_("Costs"), status=status, template="costs", **context)


def csv_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Send tokens and costs by day, agent, requester and scope as CSV: titles and at most MOST_LINES lines.

    Counts only the newest RUNS runs of the days. Status 400 for an invalid form.
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
    runs = runs_of_days(visible_runs(request.user), first, last, RUNS)
    for row in _grouped(runs, columns)[:MOST_LINES]:
        cost = "" if row["spent"] is None else format(row["spent"].normalize(), "f")
        row["owner_name"] = row["owner_name"] or _("the program")
        names = (safe_cell(row[column]) for column in columns)
        writer.writerow([*names, row["runs"], row["used"], cost, *currency])
    return response


def safe_cell(value: object) -> str:
    """Format a value as `bare` does, with an apostrophe wherever a spreadsheet would read a formula."""
    return FORMULA.sub(r"\1'", bare(value))


def _grouped(runs: QuerySet[Run], columns: list[str]) -> Any:
    """Sum runs, tokens and cost by `columns`, with the newest day first if there are days, then by cost."""
    order: list[Any] = ["-day"] if "day" in columns else []
    order += [F("spent").desc(nulls_last=True), "-used", *columns]
    groups = runs.annotate(day=TruncDate("created_at")).values(*columns)
    return groups.annotate(runs=Count("pk"), used=Sum("tokens"), spent=Sum("cost")).order_by(*order)


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    used, spent = short(row["used"] or 0), amount(row["spent"])
    return {"runs": bounded(row["runs"], RUNS), "tokens": used, "cost": spent}


def _named(row: dict[str, Any], days: dict[str, str], listed: str) -> dict[str, str]:
    """Build a line's name and the URL of the list of its runs; the URL is "" if no filter selects them."""
    query, names, is_found = {**days}, [], True
    if "day" in row:
        query = dict.fromkeys(days, row["day"].isoformat())
        names.append(date_format(row["day"]))
    if "agent" in row:
        query["agent"] = row["agent"]
        names.append(row["agent"])
    if "owner_id" in row:
        query["requester"], is_found = row["owner_id"], row["owner_id"] is not None
        names.append(row["owner_name"] or _("the program"))
    if "scope" in row:
        is_found = False
        names.append(row["scope"] or EMPTY)
    return {"name": ", ".join(map(plain, names)), "url": f"{listed}?{urlencode(query)}" if is_found else ""}
