"""Standing rules at the gate: they answer cards that only the tool's own `requires_approval` asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentruns.engine import gate
from agentruns.engine.driver import Driver
from agentruns.engine.gate import Intent, why_never
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.rules import Facts, Match, match, schema_hash
from agentruns.journal.rulings import Ruling, outdated
from agentruns.models import ApprovalRule, RuleDecision
from agentruns.models.rule import BY_RULE
from agentruns.models.statuses import GateVerdict, Verb
from agentruns.tools import Tool
from agentruns.utils.db import reading

ORDER = [*ApprovalRule.Effect]  # any denial, then any question, then any approval
VERBS = {ApprovalRule.Effect.APPROVE: Verb.APPROVE, ApprovalRule.Effect.DENY: Verb.DENY}


@dataclass(slots=True)
class Answer:
    """The rulings about one call, to be tried in turn, and those of dry runs."""

    intent: Intent
    approval: events.ApprovalRequested
    deferred: str | None  # that of the intent, as the gate gave it
    rulings: list[Ruling] = field(default_factory=list)
    trials: list[Ruling] = field(default_factory=list)

    @property
    def ruling(self) -> Ruling | None:
        """The first ruling that the database has not refused; None where a person decides."""
        return next((each for each in self.rulings if not each.refused), None)


def choose(driver: Driver, intents: list[Intent]) -> list[Answer]:
    """Try the rules of the run's scope on each call that they may answer. Reads only.

    Must run before the transaction that stores the reply, which checks the rules and caps again.
    """
    asked = [each for each in intents if each.by_tool and (each.approval or each.deferred)]
    if not asked or not driver.store.durable or driver.run.restored_at:
        return []
    its = {"scope": driver.run.scope, "agent": driver.agent.name, "tool__in": {each.tool for each in asked}}
    live = ApprovalRule.objects.using(driver.alias).live().filter(**its).order_by("name", "version")
    # The code of a model may have broken the connection.
    rules, answers = reading(driver.alias, lambda: list(live)), list[Answer]()
    for intent in asked:
        tool = driver.agent.tools[intent.tool]
        matches = _matches(driver, tool, intent, [each for each in rules if each.tool == intent.tool])
        if not matches:
            continue
        approval = intent.approval or gate.request(driver, tool, intent, intent.deferred or "")
        answer = Answer(intent, approval, intent.deferred)
        for fits in sorted(matches, key=lambda each: ORDER.index(ApprovalRule.Effect(each.rule.effect))):
            ruling = Ruling(fits, intent.id, approval["approval"], fits.rule.effect)
            if fits.rule.status == ApprovalRule.Status.DRY_RUN:
                answer.trials.append(ruling)
            # A cap that is full by now saves an attempt; the transaction decides.
            elif not any(RuleDecision.is_full(driver.alias, fits.rule, each) for each in fits.amounts):
                answer.rulings.append(ruling)
        answers.append(answer)
    return answers


def _matches(driver: Driver, tool: Tool, intent: Intent, rules: list[ApprovalRule]) -> list[Match]:
    """List the rules that fit a call, and put rules for other parameters of the tool back to a draft."""
    if why_never(tool) or not rules:
        return []
    run, schema = driver.run, schema_hash(tool.input_schema)
    facts = Facts(intent.arguments, run.context, tuple(run.requesters))
    untrusted, matches = bool(gate.warned(driver, tool)), list[Match | None]()
    for rule in rules:
        if rule.schema != schema:
            outdated(driver.alias, rule)
        elif tool.risk == "high" and rule.status == "active" and rule.activator_id in (None, rule.author_id):
            continue  # one person activated it before the risk was high
        elif not {*rule.people} & {*run.requesters} and (rule.untrusted or not untrusted):
            matches.append(match(rule, facts))
    return [fits for fits in matches if fits is not None]


def place(answers: list[Answer]) -> None:
    """Set the gate's verdicts by the rulings: a deferred call that a rule decides is no run of its own."""
    for answer in (each for each in answers if each.deferred is not None):
        intent, is_decided = answer.intent, answer.ruling is not None and answer.ruling.effect in VERBS
        intent.child, intent.deferred = not is_decided, None if is_decided else answer.deferred
        intent.verdict = GateVerdict.ASK if is_decided else GateVerdict.RUN
        intent.approval = answer.approval if is_decided else None


def write(batch: Batch, answers: list[Answer]) -> None:
    """Add the decisions of rules to the batch with the requests for approval."""
    for answer in answers:
        if answer.intent.deferred is not None:  # its card will be in a run of its own
            continue
        batch.rulings += answer.trials
        if (ruling := answer.ruling) is None:
            continue
        batch.rulings.append(ruling)
        rule = ruling.match.rule
        if (verb := VERBS.get(ApprovalRule.Effect(ruling.effect))) is None:
            continue
        payload = events.ApprovalDecided(
            verb=verb,
            digest=answer.intent.digest,
            actor={"id": "", "name": f"{BY_RULE}{rule}"},
            reason=rule.reason,
            channel=f"{BY_RULE}{rule.pk}",
        )
        batch.add(events.APPROVAL_DECIDED, payload, call=batch.state.run.calls[answer.intent.id])
