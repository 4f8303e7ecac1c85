"""The surroundings of a page's cards: rows, masks and warnings, read for all cards at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from typing import Any
from uuid import UUID

from django.db.models import F, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext as _, ngettext

from agentruns.admin.html import ago, plain, plain_line
from agentruns.agents.agent import get_agent
from agentruns.conf import settings
from agentruns.exceptions import UnknownAgentError
from agentruns.journal import copies, events, masking, outsiders, policy, read
from agentruns.models import Approval, Message, Run
from agentruns.services import permissions
from agentruns.services.runs import waiting
from agentruns.tools import Tool
from agentruns.tools.card import in_time

LATEST = 200  # decisions and calls that are read, however long the history is
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning on a card about a run or about equal calls; shown in red, unless `tone` is "waits"."""

    text: Any
    run_id: UUID | None = None
    tone: str = "bad"
    same_call: str = ""


def alike(approvals: QuerySet[Approval], cards: Iterable[Approval]) -> Mapping[str, int]:
    """Count, by `same_call`, the pending approvals of the same call as a pending card, card included."""
    pending = [card for card in cards if card.status == Approval.Status.PENDING]
    same = _same_calls(approvals, pending).pending()
    # In the order of the index of pending approvals: a call with very many requests has no better one.
    return Counter(same.order_by("requested_at", "id").values_list("same_call", flat=True))


def _same_calls(approvals: QuerySet[Approval], cards: Iterable[Approval]) -> Any:
    """Select from `approvals` those with the same call (tool and arguments) as one of the cards."""
    calls = {card.same_call for card in cards} - {""}
    same = Approval.objects.using(settings.DATABASE).filter(same_call__in=calls)
    # A narrowed queryset may have a join, which would count rows twice.
    return same.filter(pk__in=approvals.values("pk")) if policy.is_narrowed(approvals) else same


def seen_by(user: Any, run_id: UUID | str | None) -> Run | None:
    """Find a run by its id, masked; None without an id, or if the user may not see the run."""
    runs = policy.visible_runs(user).select_related("session").filter(pk=run_id) if run_id else []
    return next(iter(masking.masked_runs(runs)), None)


def tools_of(run: Run) -> dict[str, Tool]:
    """Find the tools of a run's agent by name; {} if this process does not have the run's definition."""
    try:
        agent = get_agent(run.agent, run.version)
    except UnknownAgentError:
        return {}
    return agent.tools if agent.definition_hash == run.definition_id else {}


def readers(run: Run, requested: events.Row | None) -> list[tuple[str, int | None, int]]:
    """List the tools that had read text of outsiders before a request: name, row, and the row before that.

    The row is None if it is another run's.
    """
    named = requested.payload.get("untrusted", []) if requested else []
    found = outsiders.read_by(settings.DATABASE, run) if named else {}
    rows = {tool: seq for tool, (run_id, seq) in found.items() if run_id == run.pk}
    return [(plain(tool), rows.get(tool), rows.get(tool, 1) - 1) for tool in named]


class Surroundings:
    """The data that the cards of one page share, each read at first use and once for all cards."""

    def __init__(self, user: Any, approvals: Iterable[Approval]) -> None:
        self.user, self.cards = user, list(approvals)
        self.runs = {card.run_id: card.run for card in self.cards}
        self.started = cache(self.starts)
        db = settings.DATABASE
        self.uncleared = cache(
            lambda run: waiting.uncleared(db, run, self.masks[run.session_id], self.visible)
        )
        self.cancelled = cache(lambda: waiting.cancel_requests(db, [*self.runs.values()]))
        self.given = cache(lambda: permissions.already_given(user, self.cards))
        self.unread = cache(lambda: waiting.unread(db, self.runs))
        self.groups = cache(lambda: policy.groups_of(user))
        self.alike = cache(lambda: alike(self.approvals, self.cards))

    @cached_property
    def masks(self) -> Mapping[UUID, masking.Mask]:
        """Load the masks of the cards' runs, by session."""
        return masking.masks_of(self.runs.values())

    @cached_property
    def rows(self) -> Mapping[tuple[UUID, str], list[events.Row]]:
        """Read the rows about each card's call, by (run id, call id)."""
        by_call: dict[tuple[UUID, str], list[events.Row]] = defaultdict(list)
        calls = {card.call_id for card in self.cards}
        about = Message.objects.using(settings.DATABASE).filter(run_id__in=self.runs, call_id__in=calls)
        for row in read.read_rows(about.order_by("seq")):
            by_call[row.run_id, row.call_id].append(row)
        return by_call

    @cached_property
    def previews(self) -> Mapping[UUID, Any]:
        """Call the tools' `preview` for the pending cards, and map each card's id to the preview.

        A preview that takes too long is missing; a preview that fails is None.
        """
        previews: dict[UUID, Any] = {}
        pending = [card for card in self.cards if card.status == Approval.Status.PENDING]
        called = [(card, tools_of(card.run).get(card.tool_name)) for card in pending]
        asking = [(card, tool) for card, tool in called if tool is not None and tool.preview is not None]

        def ask() -> None:
            for card, tool in asking:
                previews[card.pk] = tool.preview_of(card.arguments)

        if asking:
            in_time(ask)
        return {**previews}

    @cached_property
    def approvals(self) -> QuerySet[Approval]:
        """Select all approvals that the user may see."""
        return policy.visible_approvals(self.user)

    @cached_property
    def visible(self) -> QuerySet[Run]:
        """Select the runs that warnings may name: visible runs, or all if the user sees all approvals."""
        narrowed = policy.is_narrowed(self.approvals)
        return policy.visible_runs(self.user) if narrowed else Run.objects.using(settings.DATABASE).all()

    def flags(self, approval: Approval) -> list[Flag]:
        """List the warnings about an approval, such as that an equal call was started in this session."""
        flags: list[Flag] = []
        if self.pauses.get(approval.run_id, {}).get("restored"):
            text = _(
                "Rows of this run are lost, or may be: the call may have been made."
                " Find out before you approve."
            )
            flags.append(Flag(text, approval.run_id))
        before: dict[str, Flag] = {}
        # Not the card's digest, which is also of what it holds.
        said = [row.payload for row in self.rows[approval.run_id, approval.call_id]]
        digest = [each["digest"] for each in said if "digest" in each][-1:] or [approval.digest]
        text = _("This exact call was started in this session before, %(ago)s.")
        for run_id, call_id, facts, at in self.started(approval.run.session_id, approval.tool_name):
            if call_id != approval.call_id and facts.get("digest") == digest[0]:
                before.setdefault(call_id, Flag(text % {"ago": ago(copies.happened_at(facts, at))}, run_id))
        flags += [*before.values(), *self.elsewhere[approval.same_call]][:SHOWN]
        text = _(
            "An earlier call of this tool raised an error and may have happened. Approving settles it. %s"
        )
        flags += [
            Flag(text % plain_line(wait.text), wait.run_id)
            for wait in self.uncleared(approval.run)
            if wait.tool == approval.tool_name and wait.gates_tool and wait.text
        ][:SHOWN]
        flags += self.in_doubt[approval.tool_name][:SHOWN]
        if count := self.alike().get(approval.same_call, 1) - 1:
            text = ngettext("%(count)d equal request waits", "%(count)d equal requests wait", count)
            flags.append(Flag(text % {"count": count}, None, "waits", approval.same_call))
        return flags

    @cached_property
    def pauses(self) -> Mapping[UUID, Any]:
        """Read the facts of the last pause of each paused run on the page, by run."""
        paused = [run.pk for run in self.runs.values() if run.status == Run.Status.PAUSED]
        rows = Message.objects.using(settings.DATABASE).filter(run_id__in=paused, kind=events.RUN_PAUSED)
        return dict(rows.order_by("seq").values_list("run_id", "facts")) if paused else {}

    def starts(self, session_id: UUID, tool: str) -> list[tuple[UUID, str, Any, datetime]]:
        """Read the newest LATEST starts of a tool in a session, only in runs that warnings may name."""
        about = {"session_id": session_id, "kind": events.TOOL_STARTED, "tool_name": tool}
        rows = Message.objects.using(settings.DATABASE).filter(**about)
        if policy.is_narrowed(self.visible):
            rows = rows.filter(run__in=self.visible)
        return list(rows.order_by("-seq").values_list("run_id", "call_id", "facts", "created_at")[:LATEST])

    @cached_property
    def elsewhere(self) -> Mapping[str, list[Flag]]:
        """Map a card's `same_call` to warnings that an equal call was started in another session."""
        text = _("This exact call was approved and started in another session, %(ago)s, by %(name)s.")
        flags: dict[str, list[Flag]] = defaultdict(list)
        same = _same_calls(self.approvals, self.cards).filter(status=Approval.Status.CONSUMED)
        here = {run.session_id for run in self.runs.values()}
        newest = Window(RowNumber(), partition_by="same_call", order_by=F("decided_at").desc())
        others = same.exclude(run__session_id__in=here).annotate(place=newest).filter(place__lte=SHOWN)
        fields = ("same_call", "run_id", "decided_at", "decided_by_name")
        for call, run_id, at, name in others.order_by("-decided_at").values_list(*fields):
            flags[call].append(Flag(text % {"ago": ago(at), "name": plain(name or _("the program"))}, run_id))
        return flags

    @cached_property
    def in_doubt(self) -> Mapping[str, list[Flag]]:
        """Map each tool to the warnings about its calls in doubt, the newest run first."""
        text = _("A call of this tool is in doubt: nobody knows whether it happened.")
        orphaned = self.visible.filter(status=Run.Status.ORPHANED).order_by("-updated_at")
        runs = list(orphaned.defer("input", "output", "error")[:LATEST])
        flags: dict[str, list[Flag]] = defaultdict(list)
        places = {run.pk: place for place, run in enumerate(runs)}
        doubts = {(wait.run_id, wait.tool) for wait in waiting.orphans(settings.DATABASE, runs)}
        for run_id, tool in sorted(doubts, key=lambda doubt: places[doubt[0]]):
            flags[tool].append(Flag(text, run_id))
        return flags
