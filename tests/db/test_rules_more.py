"""Standing rules where calls wait again, runs were held, several people ask, and gates become stricter."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.db.models import F

from agentruns import (
    adopt_definition,
    approve,
    cancel_run,
    pause_run,
    resume_run,
    run_agent,
    send_message,
    start_run,
    tool,
)
from agentruns.journal import rulings
from agentruns.journal.policy import Policy
from agentruns.models import Approval, ApprovalRule, RuleAmount, RuleDecision, Run
from agentruns.services import rules
from agentruns.services.backtest import agreement, suggest
from agentruns.services.data.retention import prune_ended
from agentruns.services.runs.control import hold_run
from agentruns.testing import run_until_blocked
from agentruns.utils import failpoints
from agentruns.utils.db import in_transaction
from tests.db.helpers import user
from tests.db.racing import at_once
from tests.db.ruled import DAY, paid, payer, ran, rule
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)


class OwnRuns(Policy):
    """A user sees the runs that the user owns."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_id=user.pk)


@pytest.mark.parametrize("end", ["approve", "cancel"])
def test_a_start_that_was_rolled_back_gives_its_amount_back(
    effects: Effects, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)
    state = {"open": 5}
    payer(500, options={"transactional": True, "holds": lambda args, ctx: dict(state)})
    made = rule(caps=[{"of": "count", "most": "1", "seconds": 3600, "per": []}])
    failpoints.arm("before_tool", lambda: state.update(open=6))
    run = ran()
    assert (run.status, paid(effects)) == ("awaiting-approval", [])
    assert RuleDecision.used("default", made, 0) == 0
    if end == "cancel":
        cancel_run(run.pk)
    else:
        card = Approval.objects.get()
        approve(card.pk, None, digest=card.digest)
    run_until_blocked()
    assert RuleDecision.used("default", made, 0) == 0, "a person let it run"
    assert ran("s2").status == "completed"
    assert RuleDecision.used("default", made, 0) == 1


@pytest.mark.parametrize("options", [{"transactional": True}, {"safe_to_retry": True}])
def test_no_rule_answers_in_a_run_that_was_held_because_rows_are_lost(effects: Effects, options: Any) -> None:
    payer(500, options=options)
    rule()
    run = start_run("payer", "pay", "s1")
    hold_run(run.pk)
    resume_run(run.pk)
    run_until_blocked()
    run.refresh_from_db()
    assert (run.status, paid(effects)) == ("awaiting-approval", [])


def test_a_run_of_several_requesters_counts_toward_the_cap_of_each(effects: Effects) -> None:
    payer(500)
    rule(caps=[{"of": "count", "most": "1", "seconds": 3600, "per": ["requester"]}])
    ann, bob, eve = user("ann"), user("bob", "start_run"), user("eve")
    assert ran("s1", actor=ann).status == "completed"
    run = start_run("payer", "pay", "s2", actor=ann)
    send_message("s2", "please", owner=ann, actor=bob)
    run_until_blocked()
    run.refresh_from_db()
    assert run.status == "awaiting-approval", "the cap of ann is used up"
    assert ran("s3", actor=bob).status == "completed"
    assert ran("s4", actor=eve).status == "completed"
    assert paid(effects) == [500] * 3


def test_an_approval_by_a_rule_does_not_outlive_its_tools_leave(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)
    payer(500)
    rule()
    failpoints.arm("after_reply", lambda: pause_run(run.pk))
    run = start_run("payer", "pay", "s1")
    run_until_blocked()
    assert Approval.objects.get().status == "approved"
    payer(500, options={"rules": False})
    adopt_definition(run.pk)
    resume_run(run.pk)
    run_until_blocked()
    assert (Approval.objects.get().status, paid(effects)) == ("pending", [])


def test_a_suggestion_tells_nothing_of_cards_that_its_reader_may_not_see(settings: Any) -> None:
    writer, other = user("writer", "write_rule", "decide_approval"), user("other")

    def asked(session: str, cents: int, owner: Any) -> Approval:
        payer(cents)
        return Approval.objects.get(run_id=run_agent("payer", "pay", session, owner=owner).run_id)

    for number in range(6):
        card = asked(f"s{number}", 9000, other)
        approve(card.pk, None)
        run_until_blocked()
    mine = asked("mine", 5, writer)
    assert suggest(mine, writer) is not None
    settings.AGENTRUNS_POLICY = f"{__name__}.OwnRuns"
    assert suggest(mine, writer) is None


def test_a_doubt_about_a_call_that_an_earlier_version_approved_stops_the_active_one() -> None:
    versions = []

    @tool(requires_approval=True)
    def pay(customer: str, cents: int) -> str:
        """Pay."""
        versions.append(rule())
        raise ConnectionError("after the effect, perhaps")

    payer(500, pay=pay)
    versions.append(rule())
    other = rule(name="other", effect="ask", scope="acme")
    assert ran().status == "completed"
    for each in (*versions, other):
        each.refresh_from_db()
    assert [each.status for each in versions] == ["retired", "stopped"]
    assert (other.status, "in doubt" in versions[1].why) == ("active", True)


def test_a_doubt_beside_an_activation_stops_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    payer(500)
    first, second = rule(), rule(active=False)
    is_retired, is_stopping, move = Event(), Event(), rulings.move

    def moved(alias: str, rule_id: Any, before: Any, status: str, *about: Any, **columns: Any) -> bool:
        if status == "stopped":
            is_stopping.set()
        is_done = move(alias, rule_id, before, status, *about, **columns)
        if status == "retired":  # and not committed yet
            is_retired.set()
            if connection.vendor == "postgresql":  # SQLite lets nobody in
                is_stopping.wait()
        return is_done

    def doubt() -> None:
        is_retired.wait()
        in_transaction("default", lambda: rulings.stop("default", first.pk, "in doubt"))

    monkeypatch.setattr(rulings, "move", moved)
    at_once(lambda: rules.activate_rule(second.pk, None), doubt)
    for each in (first, second):
        each.refresh_from_db()
    assert (first.status, second.status) == ("retired", "stopped")


def test_a_dry_run_records_what_it_would_do_with_a_deferred_call(effects: Effects) -> None:
    payer(500, options={"deferred": True})
    made = rules.try_rule(rule(active=False, caps=[DAY]).pk, None)
    ran()
    card, decision = Approval.objects.get(), RuleDecision.objects.get()
    about = (decision.is_dry, decision.approval_id, decision.call_id, decision.run_id)
    assert about == (True, card.pk, card.call_id, card.run_id)
    assert (agreement(made).open, RuleDecision.used("default", made, 0)) == (1, 500)
    approve(card.pk, None)
    run_until_blocked()
    assert (agreement(made).agreed, paid(effects)) == (1, [500])


def test_pruning_drops_old_decisions_and_opens_no_cap(effects: Effects) -> None:
    payer(500)
    month = {**DAY, "most": "600", "seconds": 30 * 86400}
    made, dry = rule(caps=[month]), rules.try_rule(rule(name="dry", active=False).pk, None)
    assert (ran("s1").status, ran("s2").status) == ("completed", "awaiting-approval")

    def prune_after(days: int) -> list[ApprovalRule]:
        for rows, column in ((Run, "updated_at"), (RuleDecision, "decided_at"), (RuleAmount, "at")):
            rows._default_manager.update(**{column: F(column) - timedelta(days=days)})
        prune_ended(5)
        return [each.rule for each in RuleDecision.objects.order_by("pk")]

    assert prune_after(20) == [made, dry], "what the dry run said of the pruned card is gone"
    assert (RuleDecision.used("default", made, 0), agreement(dry).open) == (500, 1)
    assert prune_after(11) == [dry], "the cap's window is past; the other card still waits"
    assert not RuleAmount.objects.exists()
