"""Standing rules: written, tried, activated and stopped by people; tried on the cards of the past."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.db import IntegrityError
from django.db.models import Max, QuerySet
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, registered
from agentruns.conf import settings
from agentruns.engine.gate import why_never
from agentruns.exceptions import NotFoundError, PermissionDeniedError, RuleStateError
from agentruns.journal import events, rulings
from agentruns.journal.policy import is_among, visible_rules
from agentruns.journal.rules import mistakes, schema_hash
from agentruns.models import ApprovalRule, RuleChange, RuleDecision
from agentruns.services import permissions
from agentruns.tools import Tool
from agentruns.utils import clock
from agentruns.utils.bounds import REASON_LENGTH, is_name
from agentruns.utils.db import in_transaction

Status = ApprovalRule.Status
_NAME = re.compile("[a-z0-9][a-z0-9_-]{0,63}")
BEFORE: dict[str, tuple[str, ...]] = {  # status -> those from which a person may change to it
    Status.DRY_RUN: (Status.DRAFT, Status.STOPPED, Status.ACTIVE),
    Status.ACTIVE: (Status.DRAFT, Status.DRY_RUN, Status.STOPPED),
    Status.STOPPED: (Status.ACTIVE, Status.DRY_RUN),
    Status.RETIRED: (Status.DRAFT, Status.DRY_RUN, Status.ACTIVE, Status.STOPPED),
}


def draft_rule(
    actor: Any,
    *,
    name: str,
    agent: Agent | str,
    tool: str,
    effect: str = ApprovalRule.Effect.APPROVE,
    conditions: Iterable[dict[str, Any]] = (),
    caps: Iterable[dict[str, Any]] = (),
    scope: str = "",
    reason: str = "",
    untrusted: bool = False,
    expires_at: datetime | None = None,
) -> ApprovalRule:
    """Write a rule, or the next version of the rule with this name and scope, as a draft.

    `conditions` and `caps` are JSON as in docs/howto/rules.md. With `untrusted`, the rule also answers calls
    that are asked for because the run has read text of outsiders. `reason` is journaled with each decision;
    the model is told the reason of a denial. Raises ValueError for what no rule can say, NotFoundError for an
    agent or tool that this process does not have, PermissionDeniedError.
    """
    who, agent = events.actor_ref(actor), agent if isinstance(agent, str) else agent.name
    _require(actor, "write_rule", ApprovalRule(scope=scope, agent=agent, tool=tool))
    declared = tool_of(agent, tool)
    conditions, caps = list(conditions), list(caps)
    if not _NAME.fullmatch(name):
        raise ValueError(_("The name must be small letters, digits, - and _, at most 64."))
    if effect not in ApprovalRule.Effect.values or not is_name(scope) or len(reason) > REASON_LENGTH:
        raise ValueError(_("The effect, the scope or the reason is not valid."))
    if effect != ApprovalRule.Effect.APPROVE and caps:
        raise ValueError(_("Only a rule that approves has caps."))
    if effect == ApprovalRule.Effect.DENY and not reason.strip():
        raise ValueError(_("A rule that denies needs a reason: the model is told it."))
    if effect == ApprovalRule.Effect.APPROVE and not conditions and not caps:
        raise ValueError(_("A rule that approves needs a condition or a cap."))
    if expires_at is not None and expires_at <= clock.now(settings.DATABASE):
        raise ValueError(_("The rule must expire in the future."))
    if why := why_never(declared):
        raise ValueError(_("No standing rule may answer %(tool)s: %(why)s.") % {"tool": tool, "why": why})
    if why := next(mistakes(conditions, caps, declared.input_schema, declared.sensitive), ""):
        raise ValueError(why)
    rule = ApprovalRule(
        name=name, scope=scope, agent=agent, tool=tool, schema=schema_hash(declared.input_schema),
        effect=effect, conditions=conditions, caps=[{**cap, "most": str(cap["most"])} for cap in caps],
        reason=reason, untrusted=untrusted, expires_at=expires_at, people=events.people(who),
        author_id=getattr(actor, "pk", None), author_name=who["name"] if who else "",
    )  # fmt: skip
    _require(actor, "write_rule", rule)
    rules = ApprovalRule.objects.using(settings.DATABASE)

    def store() -> ApprovalRule:
        newest = rules.filter(scope=scope, name=name).aggregate(newest=Max("version"))["newest"]
        rule.version = (newest or 0) + 1
        rules.bulk_create([rule])
        by = who or events.PROGRAM
        change = RuleChange(rule_id=rule.pk, status=Status.DRAFT, actor_id=by["id"], actor_name=by["name"])
        RuleChange.objects.using(settings.DATABASE).bulk_create([change])
        return rule

    return in_transaction(settings.DATABASE, store)


def try_rule(rule_id: UUID | str, actor: Any) -> ApprovalRule:
    """Start a dry run: the rule only records what it would decide. Raises as `activate_rule`."""
    rule = _require(actor, "write_rule", find_rule(rule_id, actor))
    _fitting(rule)
    return _move(rule, actor, Status.DRY_RUN)


def activate_rule(rule_id: UUID | str, actor: Any) -> ApprovalRule:
    """Let a rule decide from now on, in place of the active version of the same name.

    For a tool of high risk, the actor must be a user, and not the author. The actor must be among the tool's
    approvers. Raises RuleStateError if the rule's status does not allow it, the rule has expired, or it was
    written for other parameters of the tool; NotFoundError, PermissionDeniedError.
    """
    rule = _require(actor, "activate_rule", find_rule(rule_id, actor))
    declared, who = _fitting(rule), events.actor_ref(actor)
    people = events.people(who)
    before = {*rule.changes.filter(status=Status.ACTIVE).values_list("actor_id", flat=True)}
    authors = {*rule.people[:1]} | ({*rule.people} - before)  # the first, and who acted in that name
    if declared.risk == "high" and (not people or {*people} & authors):
        text = _("%(tool)s has a high risk: another person than the author activates the rule %(rule)s.")
        raise PermissionDeniedError(text % {"tool": rule.tool, "rule": rule})
    if declared.approvers and not events.is_program(actor) and not is_among(actor, declared.approvers):
        text = _("%(tool)s is decided by %(approvers)s; %(name)s is not among them.")
        facts = {"tool": rule.tool, "approvers": declared.approvers, "name": actor.get_username()}
        raise PermissionDeniedError(text % facts)
    if rule.expires_at is not None and rule.expires_at <= clock.now(settings.DATABASE):
        raise RuleStateError(_("Rule %(rule)s has expired. Write a new version.") % {"rule": rule})
    name = (who or events.PROGRAM)["name"]
    columns: dict[str, Any] = {"activator_id": getattr(actor, "pk", None), "activator_name": name}
    return _move(rule, actor, Status.ACTIVE, people=[*dict.fromkeys([*rule.people, *people])], **columns)


def stop_rule(rule_id: UUID | str, actor: Any, why: str = "") -> ApprovalRule:
    """Stop a rule at once. A call that it approved, and that has not started, asks a person."""
    rule = find_rule(rule_id, actor)
    if not permissions.may(actor, "write_rule", rule):
        _require(actor, "activate_rule", rule)
    return _move(rule, actor, Status.STOPPED, why)


def stop_after(run_id: UUID) -> None:
    """Stop the rules that approved calls of a run, because the run got a bad rating."""
    alias = settings.DATABASE
    decisions = RuleDecision.objects.using(alias).filter(run_id=run_id, is_dry=False, released_at=None)
    approved = decisions.filter(effect=ApprovalRule.Effect.APPROVE)
    why = _("Run %(run)s, in which the rule approved a call, got a bad rating.") % {"run": run_id}
    for rule_id in sorted({*approved.values_list("rule_id", flat=True)}):
        in_transaction(alias, partial(rulings.stop, alias, rule_id, why))


def retire_rule(rule_id: UUID | str, actor: Any, why: str = "") -> ApprovalRule:
    """Retire a rule for good. Raises as above."""
    return _move(_require(actor, "write_rule", find_rule(rule_id, actor)), actor, Status.RETIRED, why)


def find_rule(rule_id: UUID | str, actor: Any = None) -> ApprovalRule:
    """Find a rule that an actor may see; raises NotFoundError."""
    try:
        return list_rules(actor).get(pk=UUID(str(rule_id)))
    except (ApprovalRule.DoesNotExist, ValueError):
        raise NotFoundError(_("There is no rule %(id)s.") % {"id": str(rule_id)[:50]}) from None


def list_rules(actor: Any = None) -> QuerySet[ApprovalRule]:
    """Select the rules that an actor may see, newest version first within each name."""
    is_all = events.is_program(actor)
    rules = ApprovalRule.objects.using(settings.DATABASE) if is_all else visible_rules(actor)
    return rules.order_by("name", "scope", "-version")


def tool_of(agent: str, tool: str) -> Tool:
    """Find the tool of the newest version of an agent in this process; raises NotFoundError."""
    for each in registered():
        if each.name == agent and tool in each.tools:
            return each.tools[tool]
    text = _("This process has no agent %(agent)s with a tool %(tool)s.")
    raise NotFoundError(text % {"agent": agent[:100], "tool": tool[:100]})


def risk_of(rule: ApprovalRule) -> str:
    """Find the risk of a rule's tool; "high" if this process does not have the tool."""
    try:
        return tool_of(rule.agent, rule.tool).risk
    except NotFoundError:
        return "high"


def _require(actor: Any, action: str, rule: ApprovalRule) -> ApprovalRule:
    if not permissions.may(actor, action, rule):
        text = _("%(name)s may not do this to the rule: %(why)s")
        facts = {"name": actor.get_username(), "why": permissions.why_not(actor, action)}
        raise PermissionDeniedError(text % facts)
    return rule


def _fitting(rule: ApprovalRule) -> Tool:
    """Find the rule's tool; raises RuleStateError if the rule may not answer it as it is now."""
    declared = tool_of(rule.agent, rule.tool)
    if why := why_never(declared):
        text = _("No standing rule may answer %(tool)s: %(why)s.")
        raise RuleStateError(text % {"tool": rule.tool, "why": why})
    if rule.schema != schema_hash(declared.input_schema):
        text = _("Rule %(rule)s was written for other parameters of %(tool)s. Write a new version.")
        raise RuleStateError(text % {"rule": rule, "tool": rule.tool})
    return declared


def _move(rule: ApprovalRule, actor: Any, status: str, why: str = "", **columns: Any) -> ApprovalRule:
    alias = settings.DATABASE
    rules = ApprovalRule.objects.using(alias)

    def change() -> bool:
        if status == Status.ACTIVE:
            same = rules.filter(scope=rule.scope, name=rule.name, status=Status.ACTIVE)
            for other in same.exclude(pk=rule.pk):
                text = _("Version %(version)d took its place.") % {"version": rule.version}
                rulings.move(alias, other.pk, [Status.ACTIVE], Status.RETIRED, text, actor)
        return rulings.move(alias, rule.pk, BEFORE[status], status, why[:REASON_LENGTH], actor, **columns)

    try:
        is_done = in_transaction(alias, change)
    except IntegrityError:
        is_done = False
    now = rules.get(pk=rule.pk)
    if not is_done:
        text = _("Rule %(rule)s is %(status)s: it cannot become %(wanted)s. Nothing was changed.")
        facts = {"rule": rule, "status": now.get_status_display(), "wanted": Status(status).label}
        raise RuleStateError(text % facts)
    return now
