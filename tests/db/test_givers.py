"""An approval counts while its giver may give it; who asked for a run does not approve it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now

from agentruns import Policy, ToolContext, approve, deny, fork_run, run_agent, tool
from agentruns.exceptions import ApprovalStateError, PermissionDeniedError
from agentruns.journal import deciders
from agentruns.journal.deciders import requested, requester_ids
from agentruns.journal.fold import RunState
from agentruns.journal.verify import problems
from agentruns.models import ApiToken, Approval, Run
from agentruns.services import permissions
from agentruns.services.api_tokens import create_token, revoke
from agentruns.services.data.repair import repair_session
from agentruns.services.runs.forks import run_again
from agentruns.services.sweep import sweep
from agentruns.utils import failpoints
from tests.api.http import Program
from tests.db.dying import elsewhere
from tests.db.helpers import payloads, run_turns, the_run, transfer, transferring, user
from tests.db.racing import at_once, together
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


class Blind(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Hide everything from ann."""
        return runs.none() if user.get_username() == "ann" else runs


class AnnIsOut(Policy):
    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        """Let everybody but ann decide; fail for eve."""
        if user.get_username() == "eve":
            raise LookupError("no such department")
        return user.get_username() != "ann"


Loss = Callable[[User, Any], object]


def governed_by(policy: type[Policy]) -> Loss:
    """Build a loss: the project's policy is another one from now on."""
    return lambda ann, settings: setattr(settings, "AGENTRUNS_POLICY", f"{__name__}.{policy.__name__}")


def may_only_look(ann: User, settings: Any) -> None:
    ann.user_permissions.set(Permission.objects.filter(codename="view_run"))


LOSSES: dict[str, Loss] = {
    "gone": lambda ann, settings: User.objects.filter(pk=ann.pk).delete(),
    "inactive": lambda ann, settings: User.objects.filter(pk=ann.pk).update(is_active=False),
    "without the permission": may_only_look,
    "refused by the rule": governed_by(AnnIsOut),
    "it is hidden": governed_by(Blind),
}


@pytest.mark.parametrize("when", ["the second approves", "the call is to run"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_approval_counts_no_more_once_its_giver_may_not_give_it(
    loss: str, when: str, effects: Effects, settings: Any
) -> None:
    result, card = transferring()
    ann, bob, cyd = (user(name, "decide_approval") for name in ("ann", "bob", "cyd"))
    if when == "the call is to run":
        approve(card.pk, bob)
        assert approve(card.pk, ann).status == "approved"
        LOSSES[loss](ann, settings)
    else:
        approve(card.pk, ann)
        LOSSES[loss](ann, settings)
        assert approve(card.pk, bob).status == "pending"
    for _ in range(2):
        sweep()
        run = the_run(result)
        assert (run.status, effects.count(), payloads(run, "tool_started")) == ("awaiting-approval", 0, [])
        card.refresh_from_db()
        assert (card.status, card.approved_count) == ("pending", 1)
        assert (card.decided_at, card.decided_by_id) == (None, None)
        assert permissions.givers([card]) == {card.pk: {str(bob.pk): ""}}
        (voided,) = payloads(run, "approval_voided")  # once
        assert (voided["approval"], voided["voided"]) == (str(card.pk), [str(ann.pk)])
    assert loss != "without the permission" or "ann lacks the permission" in voided["why"]
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    approve(card.pk, cyd)
    assert (sweep().completed, effects.count(), the_run(result).status) == (1, 1, "completed")
    assert payloads(run, "tool_started")[0]["approved_by"] == ["bob", "cyd"]


def test_a_rule_that_fails_lets_nothing_run_but_what_the_program_approved(
    effects: Effects, settings: Any
) -> None:
    asked = [run_turns({"tools": [call("refund", cents=5000)]}, session=name) for name in ("s1", "s2")]
    approve(asked[0].pending[0].pk, user("eve", "decide_approval"))
    approve(asked[1].pending[0].pk, None)
    settings.AGENTRUNS_POLICY = f"{__name__}.AnnIsOut"
    assert (sweep().completed, effects.count()) == (1, 1)
    assert [the_run(result).status for result in asked] == ["awaiting-approval", "completed"]


def test_a_doubt_that_an_approval_settled_is_back_when_it_is_void(effects: Effects) -> None:
    @tool
    def send(ctx: ToolContext, cents: int) -> str:
        act("send", ctx, cents=cents)
        if cents == 1:
            raise RuntimeError("the line broke")
        return "sent"

    turns = [{"tools": [call("send", cents=1)]}, {"tools": [call("send", cents=2)]}]
    result = run_turns(*turns, tools=[send])
    (card,) = result.pending
    ann = user("ann", "decide_approval")
    approve(card.pk, ann)
    ann.user_permissions.clear()
    sweep()
    run = the_run(result)
    first = payloads(run, "approval_decided")[0]["settles"]
    assert (run.status, effects.count(), len(first)) == ("awaiting-approval", 1, 1)
    approve(card.pk, user("bob", "decide_approval"))
    assert payloads(run, "approval_decided")[1]["settles"] == first
    assert (sweep().completed, effects.count()) == (1, 2)


def test_a_decision_races_with_the_voiding(effects: Effects) -> None:
    result, card = transferring()
    ann, bob, cyd = (user(name, "decide_approval") for name in ("ann", "bob", "cyd"))
    approve(card.pk, ann)
    ann.user_permissions.clear()
    together(lambda number: approve(card.pk, [bob, cyd][number]), 2)
    sweep()
    run = the_run(result)
    assert (run.status, effects.count()) == ("completed", 1)
    assert [row["voided"] for row in payloads(run, "approval_voided")] == [[str(ann.pk)]]
    assert set(payloads(run, "tool_started")[0]["approved_by"]) == {"bob", "cyd"}


def with_token(card: Approval, ann: User) -> ApiToken:
    """Approve the card with a new token of ann, and return the token."""
    token, text = create_token(ann, ["approvals:decide"])
    assert Program(text).post(f"/approvals/{card.pk}/approve", {"digest": card.digest})[0] == 200
    return token


@pytest.mark.parametrize("end", ["revoked", "deleted", "revoked before the approval was stored"])
def test_an_approval_given_with_a_token_ends_with_the_token(end: str, effects: Effects) -> None:
    result, card = transferring()
    ann, bob, cyd = (user(name, "decide_approval") for name in ("ann", "bob", "cyd"))
    for given, settles in ((0, False), (1, True)):
        if settles:
            approve(card.pk, bob)
        if end == "revoked before the approval was stored":
            token, _text = create_token(ann, ["approvals:decide"])
            revoke(token.pk, ann)
            approve(card.pk, ann, channel=f"api:{token.prefix}")
        else:
            token = with_token(card, ann)
            assert revoke(token.pk, ann) if end == "revoked" else token.delete()
        if end == "revoked":
            card.refresh_from_db()
            assert (card.status, card.approved_count) == ("pending", given), "at once"
        elif settles:
            sweep()
        else:
            assert approve(card.pk, cyd).approved_count == 1, "cyd's, and no more ann's"
            deny(card.pk, cyd, "no")
            sweep()
            assert "was revoked" in payloads(the_run(result), "approval_voided")[0]["why"]
            result, card = transferring(session="again")
    run = the_run(result)
    card.refresh_from_db()
    assert (card.status, card.approved_count, effects.count()) == ("pending", 1, 0)
    assert [row["voided"] for row in payloads(run, "approval_voided")][-1] == [str(ann.pk)]
    with_token(card, ann)
    assert (sweep().completed, effects.count()) == (1, 1)
    assert payloads(run, "tool_started")[0]["approved_by"] == ["bob", "ann"]
    assert revoke(create_token(ann, ["runs:read"])[0].pk, ann)
    assert problems(run.session_id) == []


@pytest.mark.parametrize("end", ["revoked", "deleted", "gone"])
def test_the_card_says_that_its_arguments_are_an_edit_that_counts_no_more(end: str, effects: Effects) -> None:
    result = run_turns({"tools": [call("refund", cents=5000)]})
    (card,), ann = result.pending, user("ann", "decide_approval")
    token, text = create_token(ann, ["approvals:decide"])
    body = {"digest": card.digest, "arguments": {"cents": 999_999}}
    assert Program(text).post(f"/approvals/{card.pk}/approve", body)[0] == 200
    assert {"revoked": lambda: revoke(token.pk, ann), "deleted": token.delete, "gone": ann.delete}[end]()
    sweep()
    card.refresh_from_db()
    assert (card.status, card.arguments, effects.count()) == ("pending", {"cents": 999_999}, 0)
    assert card.why.startswith("ann edited the arguments, and that counts no more: compare them. ")
    assert card.why.endswith(" refund requires approval.")
    assert problems(card.run.session_id) == []


def test_nobody_approves_an_edit_that_counts_no_more_before_the_card_says_so(effects: Effects) -> None:
    result, card = transferring()
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    edited = approve(card.pk, ann, arguments={"cents": 999_999})
    ann.user_permissions.clear()
    with pytest.raises(ApprovalStateError, match="The arguments are that person's edit"):
        approve(card.pk, bob, digest=edited.digest)
    assert approve(card.pk, bob, digest=edited.digest, arguments={"cents": 6}).approved_count == 1
    assert (sweep().waiting, effects.count(), the_run(result).status) == (0, 0, "awaiting-approval")


@pytest.mark.parametrize("ends", [False, True], ids=["it has begun", "its own token expired"])
def test_what_has_begun_and_what_no_revoked_token_gave_goes_on(ends: bool, effects: Effects) -> None:
    ann = user("ann", "decide_approval")
    result = run_turns({"tools": [call("refund", cents=5000)]})
    token, other = with_token(result.pending[0], ann), create_token(ann, ["approvals:decide"])[0]
    if ends:
        ApiToken.objects.filter(pk=token.pk).update(expires_at=Now())
        assert revoke(other.pk, ann)
    else:
        failpoints.arm("before_tool", lambda: elsewhere(lambda: revoke(token.pk, ann)))
    sweep()
    assert (the_run(result).status, effects.count()) == ("completed", 1)
    assert payloads(the_run(result), "approval_voided") == []
    assert revoke(token.pk, ann) is ends


@pytest.mark.parametrize("seen", [True, False], ids=["before the last look", "after the last look"])
def test_a_token_that_is_revoked_while_a_worker_drives_lets_nothing_start(
    seen: bool, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, card = transferring()
    ann, looks = user("ann", "decide_approval"), []
    approve(card.pk, user("bob", "decide_approval"))
    token = with_token(card, ann)

    def ready(ctx: ToolContext) -> str:
        elsewhere(lambda: revoke(token.pk, ann))
        return ""

    def look(alias: str, approval: Any) -> dict[str, str]:
        looks.append(deciders.withdrawn(alias, approval))
        return {} if len(looks) == 1 and not seen else looks[-1]

    monkeypatch.setattr(transfer, "ready", ready)
    monkeypatch.setattr("agentruns.engine.tool_calls.withdrawn", look)
    sweep()
    assert (the_run(result).status, effects.count()) == ("awaiting-approval", 0)
    assert payloads(the_run(result), "tool_started") == []
    with_token(card, ann)
    assert (sweep().completed, effects.count()) == (1, 1)


def test_a_revocation_races_with_the_start(effects: Effects) -> None:
    ann, started = user("ann", "decide_approval"), 0
    for number in range(4):
        result = run_turns({"tools": [call("refund", cents=5000)]}, session=f"s{number}")
        token = with_token(result.pending[0], ann)
        at_once(sweep, lambda token=token: revoke(token.pk, ann))
        sweep()
        run = the_run(result)
        ran, voided = effects.count() - started, len(payloads(run, "approval_voided"))
        started = effects.count()
        assert (ran, voided, run.status) in ((1, 0, "completed"), (0, 1, "awaiting-approval"))


def test_a_requester_whose_key_has_a_space_is_one(effects: Effects) -> None:
    """In a project whose users have names for primary keys."""
    run = RunState(uuid4())
    run.requesters = ["Ann Smith", "Ann", "7"]
    stored = Run(requesters=run.columns()["requesters"])
    asked = {pk: requested(SimpleNamespace(pk=pk), stored) for pk in ("Ann Smith", "Smith", "Ann", 7, 8)}
    assert asked == {"Ann Smith": True, "Smith": False, "Ann": True, 7: True, 8: False}
    assert requester_ids("Bo", origin=stored) == ["Bo", "Ann Smith", "Ann", "7"]


def test_who_asked_for_a_run_is_the_owner_and_everybody_after(settings: Any, effects: Effects) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    boss = ("decide_approval", "fork_run", "view_run")
    ann, bob, cyd, dan = (user(name, *boss) for name in ("ann", "bob", "cyd", "dan"))
    agent = shop_agent("shop", {"tools": [call("refund", cents=5000)]})
    first = run_agent(agent, "go", "s1", actor=ann)
    deny(first.pending[0].pk, bob, "no")
    sweep()
    assert Run.objects.get(pk=first.run_id).requesters == f" {ann.pk} "

    again = run_again(first.run_id, bob)
    assert again.requesters == f" {ann.pk} {bob.pk} "
    shop_agent("shop", {"tools": [call("refund", cents=5000)]}, {"tools": [call("refund", cents=6000)]})
    sweep()
    (card,) = Approval.objects.pending()
    for who in (ann, bob):
        with pytest.raises(PermissionDeniedError, match="requested this run"):
            approve(card.pk, who)
        assert not permissions.decidable_by(who, Approval.objects.pending()).exists()
    assert permissions.decidable_by(cyd, Approval.objects.pending()).exists()
    deny(card.pk, cyd, "no")
    sweep()

    fork = fork_run(again.pk, Run.objects.get(pk=again.pk).session.next_seq - 1, text="go on", actor=cyd)
    assert fork.requesters == f" {cyd.pk} {ann.pk} {bob.pk} "
    assert payloads(fork, "run_started")[-1]["requesters"] == [str(one.pk) for one in (cyd, ann, bob)]
    assert not requested(dan, fork)
    Run.objects.filter(pk=fork.pk).update(requesters="")
    (found,) = problems(fork.session_id)
    assert "requesters is ''" in found
    repair_session("default", fork.session_id)
    assert problems(fork.session_id) == []
    fork.refresh_from_db()
    assert fork.requesters == f" {cyd.pk} {ann.pk} {bob.pk} "
