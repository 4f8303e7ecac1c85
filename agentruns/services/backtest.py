"""A standing rule tried on what people decided: on the past, its dry run, and cards like one that waits."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote
from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery

from agentruns.conf import settings
from agentruns.engine.gate import OUTWARD, REQUIRES, why_never
from agentruns.exceptions import NotFoundError, PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.masking import masked_approvals
from agentruns.journal.policy import visible_approvals
from agentruns.journal.read import read_rows
from agentruns.journal.rules import Facts, Match, match, sentence
from agentruns.models import Approval, ApprovalRule, Message, RuleDecision
from agentruns.models.statuses import ApprovalStatus
from agentruns.services import permissions
from agentruns.services.rules import tool_of

SHOWN = 20  # disagreements
AT_ONCE = 2000  # cards read from the database
PRECEDENTS, ENOUGH, FEW = 50, 5, 5  # cards that a suggestion looks at, and needs; values of an `in`
VERDICTS = {
    ApprovalStatus.APPROVED: "approved",
    ApprovalStatus.CONSUMED: "approved",
    ApprovalStatus.DENIED: "denied",
    ApprovalStatus.ANSWERED: "answered",
}
EVERY = Q()
AGREES = {ApprovalRule.Effect.APPROVE: "approved", ApprovalRule.Effect.DENY: "denied"}


@dataclass
class Agreement:
    """Counts of cards that a rule and people decided; `disagreements` are the newest, with the verdict."""

    decided: int = 0  # by the rule and by people
    agreed: int = 0
    disagreed: int = 0
    open: int = 0  # cards that nobody has decided yet
    disagreements: list[tuple[UUID, str]] = field(default_factory=list)

    def count(self, approval_id: UUID, effect: str, verdict: str) -> None:
        """Count one card that the rule and people have decided; cards come in order of time."""
        self.decided += 1
        if AGREES[ApprovalRule.Effect(effect)] == verdict:
            self.agreed += 1
        else:
            self.disagreed += 1
            self.disagreements = [(approval_id, verdict), *self.disagreements][:SHOWN]


@dataclass
class Backtest(Agreement):
    """Counts of cards of the past that people have decided, and that a rule was tried on."""

    tried: int = 0
    fits: int = 0  # cards that the conditions fit
    capped: int = 0  # of these, cards for which a cap was full
    left_out: int = 0  # erased cards


@dataclass
class Window:
    """The amounts that count toward one cap at a time of the past, oldest first."""

    amounts: deque[tuple[datetime, Decimal]] = field(default_factory=deque)
    total: Decimal = Decimal(0)


class Card(NamedTuple):
    """A card that people have decided, with the arguments of the model."""

    id: UUID
    call_id: str
    at: datetime
    verdict: str
    facts: Facts


@dataclass
class Suggestion:
    """Conditions that fit a card and `count` cards that people approved, and none that they denied."""

    name: str
    conditions: list[dict[str, Any]]
    count: int
    sentence: str


def backtest(
    rule: ApprovalRule,
    actor: Any = None,
    *,
    most: int = 100_000,
    progress: Callable[[int], None] | None = None,
) -> Backtest:
    """Try a rule on the newest `most` cards of its tool that people have decided, in order of time.

    Its caps count what it would have approved. A card that people approved with other arguments counts as a
    disagreement. Leaves out cards that rules decided, that expired or were cancelled, and erased cards.
    `progress` is called with the number of cards tried so far. Raises PermissionDeniedError.
    """
    if not permissions.may(actor, "write_rule", rule):
        raise PermissionDeniedError(permissions.why_not(actor, "write_rule"))
    done, past = Backtest(), _past(rule.scope, rule.agent, rule.tool, rule.untrusted)
    edited, erased = _edited(rule.tool), _erased(rule.tool)
    times = past.order_by("-requested_at", "-pk").values_list("requested_at", flat=True)
    if oldest := times[most - 1 : most].first():
        past = past.filter(requested_at__gte=oldest)
    windows: dict[tuple[int, str], Window] = defaultdict(Window)
    done.left_out = len(erased)
    for card in _cards(past, edited):
        if card.call_id in erased:
            continue
        done.tried += 1
        if progress is not None and done.tried % AT_ONCE == 0:
            progress(done.tried)
        is_own = {*rule.people} & {*card.facts.requesters}
        if is_own or (fits := match(rule, card.facts)) is None:
            continue
        done.fits += 1
        if not _passes(fits, windows, card.at):
            done.capped += 1
        elif rule.effect in AGREES:
            done.count(card.id, rule.effect, card.verdict)
    done.disagreements = _seen(done.disagreements, actor)
    return done


def agreement(rule: ApprovalRule, actor: Any = None) -> Agreement:
    """Compare what a rule would have decided on its dry run with what people decided."""
    alias, done = settings.DATABASE, Agreement()
    status = Approval.objects.using(alias).filter(pk=OuterRef("approval_id")).values("status")[:1]
    decisions = RuleDecision.objects.using(alias).filter(rule=rule, is_dry=True, effect__in=AGREES)
    edited = _edited(rule.tool, Q(run__in=decisions.values("run_id")))
    rows = decisions.annotate(status=Subquery(status)).order_by("decided_at", "pk")
    for approval_id, call_id, effect, now in rows.values_list("approval_id", "call_id", "effect", "status"):
        if now == ApprovalStatus.PENDING:
            done.open += 1
        elif now in VERDICTS:
            done.count(approval_id, effect, "edited" if call_id in edited else VERDICTS[now])
    done.disagreements = _seen(done.disagreements, actor)
    return done


def suggest(approval: Approval, actor: Any) -> Suggestion | None:
    """Find conditions that fit a card and at least ENOUGH cards like it, which people approved unchanged.

    Looks at the newest PRECEDENTS cards of the tool, and takes values only from those that the actor may see,
    never masked ones. None if people denied or edited one that the conditions fit, if no rule may answer the
    tool, or if the actor may not write rules.
    """
    run = approval.run
    rule = ApprovalRule(agent=run.agent, tool=approval.tool_name, scope=run.scope, caps=[], people=[])
    try:
        tool = tool_of(run.agent, approval.tool_name)
    except NotFoundError:
        return None
    is_asked = approval.why == REQUIRES.format(tool=rule.tool)
    if not permissions.may(actor, "write_rule", rule) or not is_asked or why_never(tool):
        return None
    past = _past(rule.scope, rule.agent, rule.tool, False)
    newest = past.order_by("-requested_at", "-pk").values_list("pk", flat=True)[:PRECEDENTS]
    past = past.filter(pk__in=[*newest])
    of_runs = Q(run__in=[*past.values_list("run_id", flat=True)])
    edited, erased = _edited(rule.tool, of_runs), _erased(rule.tool, of_runs)
    cards = [card for card in _cards(past, edited) if card.call_id not in erased]
    approved = [card for card in cards if card.verdict == "approved"]
    seen = {pk for pk, _verdict in _seen([(card.id, card.verdict) for card in approved], actor)}
    if len(seen) < ENOUGH:
        return None
    [masked] = masked_approvals([approval])
    given = {
        name: value
        for name, value in approval.arguments.items()
        if name not in tool.sensitive and masked.arguments.get(name) == value
    }
    rule.conditions = [*_alike(given, [card.facts.arguments for card in approved if card.id in seen])]
    likes = [card for card in cards if match(rule, card.facts)]
    count = sum(card.id in seen for card in likes)
    if not rule.conditions or count < ENOUGH or any(card not in approved for card in likes):
        return None
    if not match(rule, Facts(approval.arguments, run.context, ())):
        return None
    name = re.sub("[^a-z0-9_-]", "-", f"{rule.tool}-like-{str(approval.pk)[-6:]}".lower())[-64:].lstrip("-_")
    return Suggestion(name, rule.conditions, count, sentence(rule))


def _alike(given: Mapping[str, Any], cards: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a condition for each argument that a call has in common with other calls."""
    for name, value in given.items():
        others: list[Any] = [each.get(name) for each in cards]
        path = f"arguments.{name}"
        if isinstance(value, bool):
            if all(each is value for each in others):
                yield {"path": path, "op": "==", "value": value}
        elif isinstance(value, int | float):
            numbers = [each for each in others if type(each) in (int, float)]
            if numbers and value <= max(numbers):
                yield {"path": path, "op": "<=", "value": max(numbers)}
        elif isinstance(value, str):
            texts = Counter(each for each in others if isinstance(each, str))
            if texts.keys() == {value}:
                yield {"path": path, "op": "==", "value": value}
            elif value in texts and len(texts) <= FEW and min(texts.values()) > 1:
                yield {"path": path, "op": "in", "value": sorted(texts)}


def _past(scope: str, agent: str, tool: str, untrusted: bool) -> QuerySet[Approval]:
    """Select the cards that only the tool asked for, and that people have decided."""
    alias = settings.DATABASE
    by_rule = RuleDecision.objects.using(alias).filter(call_id=OuterRef("call_id"))  # which has an index
    by_rule = by_rule.filter(approval_id=OuterRef("pk"), is_dry=False, effect__in=AGREES, released_at=None)
    cards = Approval.objects.using(alias).filter(tool_name=tool, run__agent=agent, run__scope=scope)
    own, about = REQUIRES.format(tool=tool), re.escape(OUTWARD.format(tool=tool, readers="@"))
    is_asked = Q(why=own)
    if untrusted:
        is_asked |= Q(why__regex=f"^{about.replace('@', '[^.]*')}( {re.escape(own)})?$")
    return cards.filter(is_asked, ~Exists(by_rule), status__in=VERDICTS)


def _cards(approvals: QuerySet[Approval], edited: Mapping[str, dict[str, Any]]) -> Iterator[Card]:
    columns = ("pk", "call_id", "requested_at", "status", "arguments", "run__context", "run__requesters")
    rows = approvals.order_by("requested_at", "pk").values_list(*columns)
    for pk, call_id, at, status, arguments, context, requesters in rows.iterator(AT_ONCE):
        verdict = "edited" if call_id in edited else VERDICTS[ApprovalStatus(status)]
        facts = Facts(edited.get(call_id, arguments), context, tuple(map(unquote, requesters.split())))
        yield Card(pk, call_id, at, verdict, facts)


def _edited(tool: str, among: Q = EVERY) -> dict[str, dict[str, Any]]:
    """Map each call of a tool whose arguments a person edited to the arguments that the model gave."""
    rows = Message.objects.using(settings.DATABASE).filter(among, tool_name=tool)
    edits = rows.filter(kind=events.APPROVAL_DECIDED, content__contains='"edited"')
    calls = {row.call_id for row in read_rows(edits) if "arguments" in row.payload}
    asked = read_rows(rows.filter(kind=events.APPROVAL_REQUESTED, call_id__in=calls)) if calls else []
    return {row.call_id: row.payload["arguments"] for row in asked}


def _erased(tool: str, among: Q = EVERY) -> set[str]:
    rows = Message.objects.using(settings.DATABASE).filter(among, tool_name=tool, content=None)
    return {*rows.filter(kind=events.APPROVAL_REQUESTED).values_list("call_id", flat=True)}


def _passes(fits: Match, windows: dict[tuple[int, str], Window], at: datetime) -> bool:
    """Count a call toward the simulated caps of a rule; return False, and count nothing, if one is full."""
    for cap, key, amount in fits.amounts:
        window, form = windows[cap, key], fits.rule.caps[cap]
        while window.amounts and window.amounts[0][0] <= at - timedelta(seconds=form["seconds"]):
            window.total -= window.amounts.popleft()[1]
        if window.total + amount > Decimal(form["most"]):
            return False
    for cap, key, amount in fits.amounts:
        windows[cap, key].amounts.append((at, amount))
        windows[cap, key].total += amount
    return True


def _seen(disagreements: list[tuple[UUID, str]], actor: Any) -> list[tuple[UUID, str]]:
    """Leave out the cards that the actor may not see."""
    if events.is_program(actor) or not disagreements:
        return disagreements
    visible = visible_approvals(actor).filter(pk__in=[pk for pk, _ in disagreements])
    seen = {*visible.values_list("pk", flat=True)}
    return [each for each in disagreements if each[0] in seen]
