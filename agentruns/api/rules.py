"""The endpoints of standing rules: read them, write drafts, try, activate and stop them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Self

from django.http import HttpRequest
from ninja import Path, Query
from ninja.params.functions import Body
from pydantic import BaseModel, Field

from agentruns.api import auth, schemas
from agentruns.api.errors import Problem
from agentruns.api.routing import GivenKey, key_of, once, page, router
from agentruns.api.schemas import AgentName, Id, Key, Keyed, Legal, LegalText, Moment, Name, Out
from agentruns.conf import settings
from agentruns.journal.rules import sentence
from agentruns.models import ApprovalRule, IdempotencyRecord, RuleDecision
from agentruns.services import backtest as past, rules as services

ABSENT: Any = Body(None)
MOST = 10_000  # cards that a backtest tries unless told
RuleId = Annotated[schemas.AnyId, Path(description="`id` of a standing rule")]
Status = Annotated[ApprovalRule.Status, schemas.as_string(enum=ApprovalRule.Status.values)]
OfStatus = Annotated[Status | None, Query(description="only rules with this status")]
OfAgent = Annotated[AgentName | None, Query(description="only rules for this agent")]
OfTool = Annotated[Name | None, Query(description="only rules for this tool")]


class Condition(schemas.Request):
    path: Key = Field(description="`arguments.NAME`, `context.NAME` or `requester`")
    op: Literal["==", "in", "<=", ">=", "prefix", "regex"]
    value: schemas.Plain


class Cap(schemas.Request):
    of: Key = Field(description="`count`, or the path of a number")
    most: Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,12})?$")]
    seconds: int = Field(ge=1, le=31_622_400, description="length of the window")
    per: list[Key] = Field([], max_length=20, description="paths whose values have a cap of their own")


class DraftRule(Keyed):
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
    agent: AgentName
    tool: Annotated[Name, Field(min_length=1)]
    effect: Literal["approve", "deny", "ask"] = "approve"
    conditions: list[Condition] = Field([], max_length=20)
    caps: list[Cap] = Field([], max_length=20)
    scope: schemas.Scope = Field("", description="scope of the runs whose calls the rule answers")
    reason: schemas.Reason = Field("", description="journaled; the model is told that of a denial")
    untrusted: bool = Field(False, description="also answer calls asked for because of outsiders' text")
    expires_at: schemas.Time | None = None


class Change(Keyed):
    pass


class Stop(Keyed):
    reason: schemas.Reason = ""


class Backtest(Keyed):
    most: int = Field(MOST, ge=1, le=100_000, description="how many of the newest cards to try")


class RuleOut(Out):
    id: Id
    name: str
    version: int
    scope: LegalText
    agent: str
    tool: str
    effect: str
    conditions: Annotated[list[dict[str, Any]], Legal]
    caps: list[dict[str, Any]]
    untrusted: bool
    reason: LegalText
    expires_at: Moment | None
    status: str
    why: LegalText = Field(description="why it has this status")
    sentence: LegalText = Field(description="the rule in one sentence")
    author: Id | None
    author_name: LegalText
    activator: Id | None
    activator_name: LegalText
    created_at: Moment
    decided_at: Moment | None = Field(description="time of its last decision")

    @classmethod
    def of(cls, rule: ApprovalRule, **given: Any) -> Self:
        """Build the answer for a rule."""
        return cls.made(rule, sentence=sentence(rule), **given)


class RuleChanged(Out):
    status: str
    why: LegalText
    actor_id: str = Field(description="id of the user; empty for the program")
    actor_name: LegalText
    at: Moment


class OneRule(RuleOut):
    used: list[str] = Field(description="for each cap how much counts toward it now, of all keys together")
    changes: list[RuleChanged] = Field(description="changes of its status, the last first")

    @classmethod
    def of(cls, rule: ApprovalRule, **given: Any) -> Self:
        """Build the answer for a rule, with what counts toward its caps, and its changes."""
        sums = (RuleDecision.used(settings.DATABASE, rule, place) for place, _cap in enumerate(rule.caps))
        used = [f"{each.normalize():f}" for each in sums]
        changes = [RuleChanged.made(each) for each in rule.changes.all()[:50]]
        return super().of(rule, used=used, changes=changes, **given)


class RulePage(BaseModel):
    items: list[RuleOut]
    next: str | None = Field(description="`cursor` of the next page")


class Disagreement(BaseModel):
    approval: Id
    verdict: str = Field(description="what people did: approved, denied, edited or answered")


class BacktestOut(Out):
    id: Id = Field(description="`id` of the rule")
    tried: int = Field(description="cards that people have decided")
    fits: int = Field(description="cards that the rule fits")
    agreed: int
    disagreed: int
    capped: int = Field(description="cards for which a cap was full")
    left_out: int = Field(description="erased cards")
    disagreements: list[Disagreement] = Field(description="the newest 20 that you may see")


@router.get("/rules", response=RulePage)
def list_rules(
    request: HttpRequest,
    status: OfStatus = None,
    agent: OfAgent = None,
    tool: OfTool = None,
    cursor: schemas.Cursor = None,
) -> RulePage:
    """List the standing rules that you may see, the newest first."""
    given = {"status": status, "agent": agent, "tool": tool}
    rules = services.list_rules(auth.user_of(request))
    rules = rules.filter(**{name: value for name, value in given.items() if value is not None})
    page_rows, following = page(rules, "created_at", cursor)
    return RulePage(items=[RuleOut.of(rule) for rule in page_rows], next=following)


@router.get("/rules/{rule_id}", response=OneRule)
def get_rule(request: HttpRequest, rule_id: RuleId) -> OneRule:
    """Get one standing rule, with what counts toward its caps now, and the changes of its status."""
    return OneRule.of(services.find_rule(rule_id, auth.user_of(request)))


@router.post("/rules", response=OneRule)
def draft_rule(request: HttpRequest, body: DraftRule, key: GivenKey = None) -> Any:
    """Write a standing rule as a draft, which decides nothing; of a name that exists, its next version.

    422 for what no rule can say, such as a condition on a parameter that the tool does not have. 404 for an
    agent or a tool that this process does not have.
    """
    user = auth.user_of(request)

    def act() -> OneRule:
        try:
            return OneRule.of(services.draft_rule(user, **body.given))
        except ValueError as error:
            raise Problem.named("validation", str(error), errors=[]) from error

    def again() -> OneRule:
        records = IdempotencyRecord.objects.using(settings.DATABASE)
        record = records.get(owner_id=user.pk, key=key_of(key, body))
        return OneRule.of(services.find_rule(str(record.run_id), user))

    return once(request, key, body, act, again)


@router.post("/rules/{rule_id}/dry-run", response=OneRule)
def try_rule(request: HttpRequest, rule_id: RuleId, body: Change = ABSENT, key: GivenKey = None) -> Any:
    """Start a dry run: the rule only records what it would decide. 409 if its state does not allow it."""
    return _change(request, rule_id, services.try_rule, body, key)


@router.post("/rules/{rule_id}/activate", response=OneRule)
def activate_rule(request: HttpRequest, rule_id: RuleId, body: Change = ABSENT, key: GivenKey = None) -> Any:
    """Let the rule decide from now on, in place of the active version of the same name.

    409 if its state does not allow it, if it has expired, or if its tool has changed since. For a tool of
    high risk, its author cannot activate it, and AGENTRUNS_REAUTH_SECONDS counts as for an approval.
    """

    def act(rule_id: str, user: Any) -> ApprovalRule:
        risk = services.risk_of(services.find_rule(rule_id, user))
        auth.require_password(request, risk, "rule's tool", "Activate")
        return services.activate_rule(rule_id, user)

    return _change(request, rule_id, act, body, key)


@router.post("/rules/{rule_id}/stop", response=OneRule)
def stop_rule(request: HttpRequest, rule_id: RuleId, body: Stop = ABSENT, key: GivenKey = None) -> Any:
    """Stop the rule at once. A call that it approved, and that has not started, asks a person."""
    act = partial(services.stop_rule, why=body.reason if body else "")
    return _change(request, rule_id, act, body, key)


@router.post("/rules/{rule_id}/retire", response=OneRule)
def retire_rule(request: HttpRequest, rule_id: RuleId, body: Stop = ABSENT, key: GivenKey = None) -> Any:
    """Retire the rule for good. 409 if it is retired already."""
    act = partial(services.retire_rule, why=body.reason if body else "")
    return _change(request, rule_id, act, body, key)


@router.post("/rules/{rule_id}/backtest", response=BacktestOut)
def backtest_rule(
    request: HttpRequest, rule_id: RuleId, body: Backtest = ABSENT, key: GivenKey = None
) -> Any:
    """Try the rule on the newest cards of its tool that people have decided, in order. Changes nothing."""
    user = auth.user_of(request)

    def act() -> BacktestOut:
        rule = services.find_rule(rule_id, user)
        done = past.backtest(rule, user, most=body.most if body else MOST)
        others = [Disagreement(approval=str(pk), verdict=verdict) for pk, verdict in done.disagreements]
        return BacktestOut.made(done, id=rule.pk, disagreements=others)

    return once(request, key, body, act, act)


def _change(
    request: HttpRequest, rule_id: str, act: Callable[..., ApprovalRule], body: Keyed | None, key: GivenKey
) -> Any:
    user = auth.user_of(request)

    def find() -> OneRule:
        return OneRule.of(services.find_rule(rule_id, user))

    return once(request, key, body, lambda: OneRule.of(act(find().id, user)), find)
