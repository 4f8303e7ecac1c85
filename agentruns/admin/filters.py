"""The filters and the search of the console's lists, all on the admin's own queryset."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG, PAGE_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Case, F, Field, Model, Q, QuerySet, Value, When
from django.db.models.functions import Length
from django.db.models.lookups import LessThanOrEqual
from django.http import HttpRequest
from django.utils import timezone
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext_lazy as _

from agentruns import journal, services
from agentruns.admin.base import MOST, Bounded, first_id
from agentruns.admin.html import ONE_LINE, bare, plain, pretty, reason
from agentruns.conf import settings
from agentruns.models import Approval, Message, Review, Run, Session, fields, statuses
from agentruns.utils import bounds, clock
from agentruns.utils.redaction import is_on, redact, redacted

APPROVED = (Approval.Status.APPROVED, Approval.Status.CONSUMED)  # people see no difference
# The riskier first, then those that expire sooner, then those that wait longer.
URGENT_FIRST = (statuses.RISK_RANK.asc(), F("expires_at").asc(nulls_last=True), "requested_at", "id")
HEAVY = ("arguments", "holds", "why", "run__input", "run__output", "run__error", "run__usage")
QUEUED = 200  # cards of the queue that are searched for the next one
LATELY = timedelta(hours=24)
SEARCHED = 2_000  # rows whose texts a search compares
LOOKED_AT = 200  # runs whose context is masked and compared
SHORT = 4_000  # characters of an error or an answer that a list reads
ERRORS = 200  # failed runs that are grouped by their cause
WEEK = timedelta(days=7)
SKEW = timedelta(days=1)  # difference of the clocks of an id and its row
# Yields the id of each row and the texts that a search compares
Texts = Callable[[Collection[Any]], Iterable[tuple[UUID, Sequence[str]]]]
# What differs between failures of one cause: ids and numbers
_VARYING = re.compile(r"\b(?=[0-9a-fA-F-]*\d)[0-9a-fA-F-]{8,}\b|\d+(?:[.,:]\d+)*")
_ID = re.compile(r"[0-9a-f]{4,32}")
_MARKUP = str.maketrans("", "", "*`")  # markdown that a list removes from an answer
# DISTINCT would read each row. This query looks up the first name, then each next name.
_NAMES = """
WITH RECURSIVE names(name) AS (
    SELECT MIN({column}) FROM {table}
    UNION ALL
    SELECT (SELECT MIN({column}) FROM {table} WHERE {column} > names.name) FROM names WHERE name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""


def searched(request: HttpRequest, rows: QuerySet[Any], term: str, texts: Texts, run: str = "") -> Any:
    """Select the rows that a search term finds by the beginning of a name or id, or by a part of a text.

    `texts` yields the texts of rows as they are displayed. Only the newest SEARCHED rows are compared by
    texts; `request.agentruns_cut` becomes this number if there are older rows. Every term is compared with
    the texts, so that neither result nor time reveals a masked value. `run` is the lookup from the rows to
    Run, "" if they are runs.
    """
    term = term.strip().replace("\x00", "")
    newest = list(rows.order_by("-pk")[: SEARCHED + 1])
    request.agentruns_cut = len(newest) > SEARCHED and Bounded(SEARCHED)  # type: ignore[attr-defined]
    wanted, displayed = term.casefold(), texts(newest[:SEARCHED])
    keys = [pk for pk, each in displayed if any(wanted in text.casefold() for text in each)]
    if not run:
        return rows.filter(matching(term, rows, also=keys))
    # An OR of two tables would read both.
    named = rows.model._base_manager.filter(matching(term, Run.objects.all(), run)).order_by("-pk")
    some = rows.model._base_manager.filter(pk__in=named.values("pk")[: MOST + 1]).values("pk")
    return rows.filter(pk__in=rows.model._base_manager.filter(pk__in=keys).values("pk").union(some))


def matching(term: str, runs: QuerySet[Any], run: str = "", also: Collection[UUID] = ()) -> Q:
    """Build the condition for runs in `also`, or whose id, session key or requester begins with `term`.

    `run` is the lookup from the rows to Run. If it is "", runs with the context value `term` match, too. With
    more than one kind of match, only the newest MOST + 1 of `runs` count for each kind.
    """
    parts, keys = [_named(term)], {*also, *([] if run else _in_context(term, runs))}
    digits = term.lower().replace("-", "")
    if _ID.fullmatch(digits):  # the beginning of an id: a range, which an index serves
        parts.append(Q(pk__gte=UUID(digits.ljust(32, "0")), pk__lte=UUID(digits.ljust(32, "f"))))
    if keys:
        parts.append(Q(pk__in=keys))
    if len(parts) == 1:
        return _named(term, run)
    # An OR of two tables would read both. Each condition finds its newest runs, as many as a list counts.
    newest = (runs.filter(which).order_by("-pk").values("pk")[: MOST + 1] for which in parts)
    first, *others = (Run.objects.filter(pk__in=some).values("pk") for some in newest)
    return Q(**{f"{run}pk__in": first.union(*others)})


def run_texts(user: Any, runs: Collection[Any]) -> Iterator[tuple[UUID, list[str]]]:
    """Yield each run's id and its displayed texts for a search, with titles of approvals the user may see.

    `runs` need the annotations of `with_texts`, and `task_text`.
    """
    masks = journal.masking.masks_of(runs, size=journal.masking.MOST_READ) if runs else {}
    asked: dict[UUID, list[tuple[str, str]]] = defaultdict(list)
    approvals = journal.policy.visible_approvals(user).order_by("-requested_at", "-id")
    for run_id, tool, title in approvals.values_list("run_id", "tool_name", "title")[:SEARCHED]:
        asked[run_id].append((tool, title))
    for run in runs:
        mask = masks[run.session_id]
        titles = (redact(str(mask.tool_text(tool, title))) for tool, title in asked[run.pk])
        error, answer = mask.json(run.error_text) or "", mask.json(run.answer) or ""
        told = (mask.json(run.task_text), error, reason(error), answer, answer.translate(_MARKUP))
        yield run.pk, [*_texts_of(mask.run(run)), *map(redact, filter(None, told)), *titles]


def _texts_of(run: Run) -> Iterator[str]:
    values = (bounds.said(each) for each in redacted(run.context).values())  # with their names: _in_context
    yield from (redact(run.title), redact(run.session.key), redact(run.owner_name), *values)


def approval_texts(user: Any, approvals: Collection[Approval]) -> Iterator[tuple[UUID, list[str]]]:
    """Yield each approval's id and its displayed texts for a search, with the requester and the session key.

    Includes title and context of the run if the user may see the run. Replaces each approval's arguments by
    its annotation `given`.
    """
    runs = {approval.run_id: approval.run for approval in approvals}
    masks = journal.masking.masks_of(runs.values(), size=journal.masking.MOST_READ) if runs else {}
    seen = {*journal.policy.visible_runs(user).filter(pk__in=runs).values_list("pk", flat=True)}
    requested = Message.objects.using(settings.DATABASE).filter(
        LessThanOrEqual(Length("content"), 2 * SHORT), run_id__in=runs, kind=journal.events.APPROVAL_REQUESTED
    )
    rows = journal.read.readable_rows(requested.order_by("-created_at")[:SEARCHED])
    previews = {row.payload.get("approval", ""): row.payload.get("preview") for row in rows}
    for approval in approvals:
        approval.arguments = approval.given  # type: ignore[attr-defined]
        mask, run = masks[approval.run.session_id], approval.run
        tool, masked = approval.tool_name, mask.approval(approval)
        preview = mask.tool_text(tool, previews.get(str(approval.pk)))
        texts = [redact(masked.title), tool, pretty(masked.arguments), pretty(preview)]
        names = (redact(run.session.key), redact(run.owner_name))
        yield approval.pk, [*texts, *(_texts_of(masked.run) if run.pk in seen else names)]


def _in_context(term: str, runs: QuerySet[Any]) -> list[UUID]:
    """Find the ids of runs whose displayed context has the value `term`, or name and value as in `tenant:7`.

    Compares only the newest LOOKED_AT runs with such a context.
    """
    name, _colon, value = term.partition(":")
    which = Q(context_values__value=term) | Q(context_values__key=name, context_values__value=value)
    some = runs.filter(pk__in=runs.filter(which).order_by("-pk").values("pk")[:LOOKED_AT])
    rows = list(some.select_related(None).only("session_id", "definition_id", "context"))
    masks = journal.masking.masks_of(rows, size=journal.masking.MOST_READ) if rows else {}
    contexts = {run.pk: redacted(masks[run.session_id].run(run).context) for run in rows}
    found = ((pk, key, bounds.said(each)) for pk, its in contexts.items() for key, each in its.items())
    return [pk for pk, key, text in found if term in (text, f"{key}:{text}")]


def _named(term: str, run: str = "") -> Q:
    """Build the condition for runs whose session key or requester, as displayed, begins with `term`."""
    key, requester = "key__istartswith", "owner_name__istartswith"
    if not is_on():
        return Q(**{f"{run}session__{key}": term}) | Q(**{f"{run}session__{requester}": term})
    sessions = Session.objects.using(settings.DATABASE).filter(Q(**{key: term}) | Q(**{requester: term}))
    newest = sessions.order_by("-pk").values_list("pk", "key", "owner_name")[:SEARCHED]
    wanted = term.casefold()
    keys = [pk for pk, *names in newest if any(redact(name).casefold().startswith(wanted) for name in names)]
    return Q(**{f"{run}session__in": keys})


def names(alias: str, model: type[Model], column: str) -> list[str]:
    """List the distinct values of a text column, sorted. Fast only if an index begins with the column."""
    connection = connections[alias]
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        cursor.execute(_NAMES.format(table=quote(model._meta.db_table), column=quote(column)))
        return [name for (name,) in cursor.fetchall()]


class KnownValues(admin.SimpleListFilter):
    """A filter that selects nothing for a value that is not among its choices: URLs may hold anything."""

    offered: Sequence[tuple[str, Any]] = ()
    lookup = ""  # of the chosen value, unless a subclass has a `chosen` of its own

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return self.offered

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Select the rows of the chosen value; all rows if no value is chosen, none if it is no choice."""
        if not (value := self.value()):
            return queryset
        known = value in [str(offered) for offered, _title in self.lookup_choices]
        self.user = request.user
        return self.chosen(queryset, value) if known else queryset.none()

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Select the rows for `value`, one of the filter's choices."""
        return queryset.filter(**{self.lookup: value})


def with_texts(runs: QuerySet[Any], **more: str) -> QuerySet[Any]:
    """Annotate runs with `error_text` and `answer`; a text of more than SHORT characters becomes "".

    `more` maps the names of further annotations to the columns of their texts.
    """
    texts = {"error_text": "error", "answer": "output", **more}
    annotated: QuerySet[Any] = runs.annotate(**{name: if_short(column) for name, column in texts.items()})
    return annotated


def if_short(column: str, kind: type[Field[Any, Any]] = fields.EscapedTextField, otherwise: Any = "") -> Case:
    """Build the expression for a column's value, or for `otherwise` if it has more than SHORT characters."""
    is_short = LessThanOrEqual(Length(column), SHORT)
    return Case(When(is_short, then=column), default=Value(otherwise, kind()), output_field=kind())


def failures(user: Any) -> dict[str, tuple[str, list[Any]]]:
    """Group the newest ERRORS runs that failed in the last week, and that the user may see, by their cause.

    A cause is the first line of an error, without numbers and ids. The dict maps a digest of each cause to
    the cause and its runs.
    """
    since = clock.now(settings.DATABASE) - WEEK
    failed = journal.policy.visible_runs(user).filter(status=Run.Status.FAILED, updated_at__gte=since)
    rows = failed.order_by("-updated_at").only("session_id", "definition_id", "agent", "updated_at")
    runs: list[Any] = list(rows.annotate(error_text=if_short("error"))[:ERRORS])
    masking, causes = journal.masking, dict[str, tuple[str, list[Any]]]()
    masks = masking.masks_of(runs, masking.MOST_ROWS, masking.MOST_READ) if runs else {}
    for run in runs:
        text = bare(masks[run.session_id].json(run.error_text)).strip() or str(_("no message"))
        cause = _VARYING.sub("…", reason(text.splitlines()[0]))[: ONE_LINE * 2]
        key = salted_hmac("agentruns.failure", cause, algorithm="sha256").hexdigest()[:16]
        causes.setdefault(key, (cause, []))[1].append(run)
    return causes


class FailureFilter(KnownValues):
    """A filter by the cause of a failure; a link on the front page sets it."""

    title = _("cause")
    parameter_name = "cause"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer the cause in the URL as the only choice; offer nothing if the URL has no cause."""
        value = self.value()
        self.cause = failures(request.user).get(value) if value else None
        return [(value, plain(self.cause[0]) if self.cause else str(_("unknown")))] if value else []

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Select the runs that `failures` groups under this cause; none if the cause is not known."""
        return queryset.filter(pk__in=[run.pk for run in self.cause[1]] if self.cause else [])


class ReviewFilter(KnownValues):
    """A filter by a run's review: rated good, rated bad, or assigned to the user."""

    title = _("review")
    parameter_name = "review"
    template = "agentruns/admin/filter_chips.html"
    offered = (("mine", _("mine")), ("good", _("rated good")), ("bad", _("rated bad")))

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        ratings = {"good": Review.Rating.GOOD, "bad": Review.Rating.BAD}
        which = {"assignee_id": self.user.pk} if value == "mine" else {"rating": ratings[value]}
        return queryset.filter(pk__in=Review.objects.using(queryset.db).filter(**which).values("pk"))


class RunStatusFilter(KnownValues):
    """A filter by status, or by a group, such as the runs that need a person or ended in doubt."""

    title = _("status")
    parameter_name = "status"
    template = "agentruns/admin/filter_chips.html"
    offered = (
        ("person", _("needs a person")),
        ("stalled", _("stalled")),
        ("blocked", _("blocked")),
        ("failed-lately", _("failed in the last 24 hours")),
        ("ended-in-doubt", _("ended in doubt")),
        *Run.Status.choices,
    )

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value == "ended-in-doubt":
            left = services.runs.waiting.ended_in_doubt(queryset.db, journal.policy.visible_runs(self.user))
            return queryset.filter(pk__in={wait.run_id for wait in left})
        person = Q(status__in=services.runs.waiting.FOR_PEOPLE)
        which = {"person": person, "stalled": services.runs.waiting.STALLED, "failed-lately": failed_lately()}
        which["blocked"] = services.runs.waiting.blocked()
        return queryset.filter(which.get(value, Q(status=value)))


def failed_lately() -> Q:
    """Build the condition for the runs that failed in the last 24 hours."""
    return Q(status=Run.Status.FAILED, updated_at__gte=clock.now(settings.DATABASE) - LATELY)


class StartedFilter(admin.ListFilter):
    """A filter by the first and the last day of a run's start, in the displayed time zone."""

    title = _("day of the start")
    template = "agentruns/admin/filter_days.html"
    first, last = "started_from", "started_to"

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self.days = {name: params.pop(name, [""])[-1].strip() for name in (self.first, self.last)}
        self.used_parameters = {name: day for name, day in self.days.items() if day}
        mine = (self.first, self.last, PAGE_VAR, ERROR_FLAG)
        kept = ((name, values) for name, values in request.GET.lists() if name not in mine)
        self.others = [(name, value) for name, values in kept for value in values]

    def expected_parameters(self) -> list[str | None]:
        return [self.first, self.last]

    def has_output(self) -> bool:
        """Return True, because this filter is always shown."""
        return True

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """Yield the links for any day, for today and for the past 7 days."""
        today = timezone.localtime(clock.now(settings.DATABASE)).date()
        for title, days in ((_("Any day"), None), (_("Today"), 0), (_("Past 7 days"), 6)):
            chosen = {} if days is None else {self.first: (today - timedelta(days=days)).isoformat()}
            query = changelist.get_query_string(chosen, [self.first, self.last])
            yield {"selected": self.used_parameters == chosen, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Select the runs started from the first to the last day, where chosen; none if a day is invalid."""
        try:
            if first := self.days[self.first]:
                start = midnight(date.fromisoformat(first))
                queryset = queryset.filter(created_at__gte=start, id__gte=first_id(start - SKEW))
            if last := self.days[self.last]:
                end = midnight(date.fromisoformat(last) + timedelta(days=1))
                queryset = queryset.filter(created_at__lt=end, id__lt=first_id(end + SKEW))
        except (ValueError, OverflowError):
            return queryset.none()
        return queryset


def midnight(day: date) -> datetime:
    """Find the first moment of a day, in the displayed time zone."""
    return timezone.make_aware(datetime.combine(day, time.min))


class ApprovalStatusFilter(KnownValues):
    """A filter by the status of an approval; without a choice it selects pending approvals."""

    title = _("status")
    parameter_name = "status"
    default = Approval.Status.PENDING.value
    offered = (
        *(choice for choice in Approval.Status.choices if choice[0] != Approval.Status.CONSUMED),
        ("all", _("All")),
    )

    def value(self) -> str:
        """Read the choice from the URL; without one, "pending"."""
        return super().value() or self.default

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """Yield the choices' links; the link of the default removes the parameter from the URL."""
        for value, title in self.lookup_choices:
            changed = {} if value == self.default else {self.parameter_name: value}
            removed = [self.parameter_name] if value == self.default else []
            query = changelist.get_query_string(changed, removed)
            yield {"selected": self.value() == value, "query_string": query, "display": title}

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Select the approvals of the chosen status. "approved" includes approvals whose call has started."""
        done = {Approval.Status.APPROVED.value: Q(status__in=APPROVED), "all": Q()}
        which = {self.default: Q(status=statuses.PENDING), **done}
        return queryset.filter(which.get(value, Q(status=value)))


class MineFilter(KnownValues):
    """A filter for unexpired approvals that the user may decide and has not approved yet."""

    title = _("whose turn")
    parameter_name = "mine"
    offered = (("yes", _("mine to decide")),)

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Select the pending approvals that this user can decide now, by `permissions.decidable_by`.

        The result may include approvals that the policy's `can_decide` refuses.
        """
        pending = queryset.filter(status=statuses.PENDING).order_by(*URGENT_FIRST)
        return services.permissions.decidable_by(self.user, pending)


class NameFilter(KnownValues):
    """A filter by `lookup`, which offers the values of the column `field` in the rows of `model`."""

    model: type[Model] = Run
    field = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """List the names in the rows that the user may see.

        If the policy hides some rows from the user, reads only the newest MOST of the visible rows.
        """
        rules, user = journal.policy, request.user
        visible = rules.visible_runs(user) if self.model is Run else rules.visible_approvals(user)
        if rules.is_narrowed(visible):
            newest = visible.order_by("-pk").values("pk")[:MOST]
            rows: Any = self.model._base_manager.using(visible.db).filter(pk__in=newest)
            values = rows.order_by(self.field).values_list(self.field, flat=True).distinct()
        else:
            values = names(visible.db, self.model, self.field)
        return [(name, plain(name)) for name in values]


class LinkFilter(KnownValues):
    """A filter that is offered only after a user follows a link, such as the link to a session's runs."""

    shown = ""  # the run's attribute that names the value for people

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer the value in the URL as the only choice; nothing if the URL has none.

        The label comes from a run with this value that the user may see; without one it is "unknown".
        """
        if not (value := self.value()):
            return []
        self.run = None
        with suppress(ValueError, OverflowError, ValidationError):  # a URL may hold anything
            runs = journal.policy.visible_runs(request.user).filter(**{self.lookup: value})
            self.run = runs.select_related("session").only("owner_name", "session__key").first()
        return [(value, plain(attrgetter(self.shown)(self.run)) if self.run else str(_("unknown")))]

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Select the runs with the value; none if the user may see no such run."""
        return super().chosen(queryset, value) if self.run else queryset.none()


class SameCallFilter(KnownValues):
    """A filter for calls with equal tool and arguments; offered only after a user follows a card's link."""

    title = _("equal calls")
    parameter_name = "same"
    lookup = "same_call"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Offer the digest in the URL as the only choice; offer nothing if the URL holds no digest."""
        value = self.value() or ""
        return [(value, _("those of one card"))] if re.fullmatch("[0-9a-f]{64}", value) else []


def filter_of(kind: type[KnownValues], title: Any, name: str, **attributes: Any) -> type[KnownValues]:
    """Build a subclass of NameFilter or LinkFilter for the URL parameter `name`, with these `attributes`."""
    return type(f"{name.title()}Filter", (kind,), {"title": title, "parameter_name": name, **attributes})


OF_APPROVALS = (
    MineFilter,
    ApprovalStatusFilter,
    filter_of(NameFilter, _("agent"), "agent", field="agent", lookup="run__agent"),
    filter_of(NameFilter, _("tool"), "tool", model=Approval, field="tool_name", lookup="tool_name"),
    SameCallFilter,
)
OF_RUNS = (
    RunStatusFilter,
    ReviewFilter,
    StartedFilter,
    filter_of(NameFilter, _("agent"), "agent", field="agent", lookup="agent"),
    filter_of(LinkFilter, _("session"), "session", lookup="session_id", shown="session.key"),
    filter_of(LinkFilter, _("requester"), "requester", lookup="owner_id", shown="owner_name"),
    FailureFilter,
)
