"""Each kind of bad input gets its typed error, which says what to do next, and nothing is lost."""

from __future__ import annotations

import pytest
from django.db import transaction

import agentruns.exceptions as errors
from agentruns import Agent, MemoryStore, approve, deny, get_run, resume_run, run_agent, start_run
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run, Session
from agentruns.services.control import cancel_run, pause_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from agentruns.tools import Tool
from tests.db.helpers import outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_without_an_agent_a_text_or_a_session() -> None:
    shop_agent("known")
    for agent, text, session, error, match in (
        ("unknown", "do it", "s1", errors.UnknownAgentError, "known"),
        ("known", " ", "s1", ValueError, "empty"),
        ("known", "do it", "", errors.NotDurableError, "session"),
        ("known", "do it", None, errors.NotDurableError, "session"),
    ):
        with pytest.raises(error, match=match):
            start_run(agent, text, session)
    assert Session.objects.count() == 0


def test_unknown_run() -> None:
    for run_id in ("018f0000-0000-7000-8000-000000000000", "nonsense", "", 7):
        for service in (get_run, resume_run):
            with pytest.raises(errors.DurableRunNotFoundError, match="There is no run"):
                service(run_id)
        with pytest.raises(errors.NotFoundError):
            approve(run_id, None)


def test_a_call_that_cannot_run_is_told_to_the_model() -> None:
    turns = [
        {"tools": [call("post", text=["not", "text"])]},
        {"tools": [call("post")]},
        {"tools": [call("post", text="x", colour="red")]},
        {"tools": [{"name": "post", "input": "not an object"}]},
        {"tools": [call("nothing_like_it")]},
        {"tools": [call("not a name at all! " * 9)]},
        {"content": [{"type": "tool_use", "name": "post"}], "stop_reason": "tool_use"},
        {"content": [{"type": "tool_use", "id": 7, "name": None, "input": 1}], "stop_reason": "tool_use"},
        {"tools": [call("broken")]},
    ]
    result = run_turns(*turns, {"tools": [call("lookup", number="A1")]})
    run = the_run(result)
    assert (run.status, outcomes(run)) == ("completed", ["error"] * len(turns) + ["ok"])
    assert all(told["is_error"] for told in payloads(run, "tool_result")[:-1])
    check_messages(result.messages)


def test_a_tool_that_raises_may_have_acted_and_says_so(effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call("broken")]}))
    (told,) = payloads(run, "tool_result")
    assert "ValueError: the printer is on fire" in told["content"]
    assert "may or may not have happened" in told["content"]
    assert effects.count() == 1


def test_a_reply_cut_at_max_tokens_runs_nothing(effects: Effects) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "he"}}
    text = {"type": "text", "text": "half a sen"}
    result = run_turns(*({"content": [block], "stop_reason": "max_tokens"} for block in (use, text)))
    run = the_run(result)
    assert (run.status, effects.count(), outcomes(run)) == ("completed", 0, ["error"])
    assert run.output == "half a sen"
    assert payloads(run, "run_completed")[0]["truncated"] is True
    check_messages(result.messages)


@pytest.mark.parametrize("stop", ["refusal", "model_context_window_exceeded", "something_new"])
def test_other_stop_reasons_fail_the_run_and_the_session_goes_on(stop: str, effects: Effects) -> None:
    block = {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "x"}}
    run = the_run(run_turns({"content": [block], "stop_reason": stop}))
    assert (run.status, outcomes(run), effects.count()) == ("failed", ["error"], 0)
    again = run_agent(shop_agent("next"), "and now?", "s1", idempotency_key="k2")
    assert again.status == "completed"
    check_messages(again.messages)


def test_an_approval_decided_twice(effects: Effects) -> None:
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    card = run_turns({"tools": [call("refund", cents=5000)]}).pending[0]
    approve(card.pk, ann)
    with pytest.raises(errors.ApprovalStateError, match=r"closed \(approved\): decided by ann, 20"):
        deny(card.pk, bob, "no")
    assert sweep().completed == 1
    with pytest.raises(errors.ApprovalStateError, match=r"closed \(approved, done\): decided by ann"):
        approve(card.pk, bob)
    assert effects.count() == 1


def test_a_decision_on_something_else_than_what_was_seen(effects: Effects) -> None:
    turn = {"tools": [call("refund", cents=5000), call("refund", cents=6000)]}
    first, second = run_turns(turn).pending
    for digest in ("0" * 64, first.digest):
        with pytest.raises(errors.ApprovalStateError, match="Look at it again"):
            approve(second.pk, None, digest=digest)
    approve(first.pk, None, digest=first.digest)
    sweep()
    second.refresh_from_db()
    assert (second.status, [line["cents"] for line in effects.lines()]) == ("pending", [5000])


def test_a_decision_needs_the_permission_and_a_denial_a_reason() -> None:
    card = run_turns({"tools": [call("refund", cents=5000)]}).pending[0]
    eve = user("eve", "view_approval")
    for decide in (approve, lambda pk, actor: deny(pk, actor, "no")):
        with pytest.raises(errors.PermissionDeniedError, match="decide_approval"):
            decide(card.pk, eve)
    with pytest.raises(errors.ApprovalStateError, match="needs a reason"):
        deny(card.pk, None, "  ")
    assert Message.objects.filter(kind="approval_decided").count() == 0


def test_a_session_of_somebody_else_or_of_nobody() -> None:
    ann, eve = user("ann"), user("eve")
    agent = shop_agent("hers")
    for session, actor in (("s1", ann), ("s2", None)):
        start_run(agent, "do it", session, actor=actor)
        with pytest.raises(errors.SessionAccessDeniedError) as denied:
            start_run(agent, "do it", session, actor=eve)
        assert str(denied.value) == f"There is no session '{session}'."
    assert list(Run.objects.order_by("pk").values_list("session__owner", flat=True)) == [ann.pk, None]


def test_another_task_in_a_busy_session() -> None:
    agent = shop_agent("busy")
    run = start_run(agent, "do it", "s1", idempotency_key="k1")
    with pytest.raises(errors.SessionBusyError, match=str(run.pk)) as busy:
        start_run(agent, "do something else", "s1", idempotency_key="k2")
    assert busy.value.run_id == str(run.pk)
    with pytest.raises(errors.SessionBusyError, match="another idempotency key"):
        start_run(agent, "do it", "s1", idempotency_key="k2")
    assert start_run(agent, "do it", "s1") == run


def test_an_idempotency_key_used_for_another_task() -> None:
    agent = shop_agent("keyed")
    run = start_run(agent, "do it", "s1", idempotency_key="k1")
    for session in ("s1", "s2"):
        with pytest.raises(errors.RunStateError, match=str(run.pk)):
            start_run(agent, "do something else", session, idempotency_key="k1")
    assert Session.objects.count() == 1


def test_a_call_inside_an_outer_transaction(effects: Effects) -> None:
    agent = shop_agent("inner", {"tools": [call("post", text="hi")]})
    with transaction.atomic(), pytest.raises(errors.NotDurableError, match=r"agent\.start\(\)"):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    assert (Run.objects.count(), effects.count()) == (0, 0)
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    with transaction.atomic(), pytest.raises(errors.NotDurableError):
        resume_run(run.pk)
    with transaction.atomic(), pytest.raises(errors.NotDurableError):
        sweep()


class Forgetful(DatabaseStore):
    """A store of somebody else: what it says of itself counts, not its class."""

    durable = False

    def append(self, *arguments: object, **options: object) -> None:
        raise AssertionError("a store that forgets was written to")


@pytest.mark.parametrize("store", [MemoryStore(), Forgetful()])
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_session_with_a_store_that_forgets(tools: list[Tool], store: MemoryStore | Forgetful) -> None:
    model = ScriptedModel([lambda request: pytest.fail("the model was asked")])
    agent = Agent("forgetful", instructions="Forget.", tools=tools, model=model)
    for service in (run_agent, start_run):
        with pytest.raises(errors.MemoryStoreNotDurableError) as refused:
            service(agent, "do it", "s1", store=store)
        assert "Leave the store out to use the database" in str(refused.value)
        assert "leave the session out to run statelessly" in str(refused.value)
    assert Session.objects.count() == 0
    chat = Agent("chat", instructions="Chat.", model=ScriptedModel([{"text": "hello"}]))
    assert run_agent(chat, "hi", store=MemoryStore()).output == "hello", "without a session it is fine"


@pytest.mark.parametrize("option", ["checkpoint_interval", "on_checkpoint", "checkpoint_every", "durable"])
def test_there_is_no_switch_that_sounds_durable(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        Agent("sounds", instructions="x", model=ScriptedModel([]), **{option: True})
    with pytest.raises(TypeError, match=option):
        run_agent(shop_agent("silent"), "do it", "s1", **{option: True})
    assert Run.objects.count() == 0


def test_a_run_that_has_ended_refuses_everything() -> None:
    run = the_run(run_turns())
    for service in (resume_run, cancel_run, pause_run):
        with pytest.raises(errors.RunStateError, match="has ended"):
            service(run.pk)
    assert the_run(run_turns()).pk == run.pk


def test_another_definition_than_the_run_was_started_with() -> None:
    with isolated_registry():
        run = start_run(shop_agent("drift"), "do it", "s1", idempotency_key="k")
    with isolated_registry():
        shop_agent("drift", max_steps=7)
        before = Run.objects.values().get()
        with pytest.raises(errors.DurableConfigMismatchError) as mismatch:
            resume_run(run.pk)
        assert mismatch.value.parts == ("max_steps",)
        assert Run.objects.values().get() == before
        assert sweep().blocked == 1
        blocked = Run.objects.get()
        assert (blocked.attempts, blocked.status, "max_steps" in blocked.blocked_reason) == (
            0,
            "queued",
            True,
        )
    with isolated_registry():
        shop_agent("drift")
        assert resume_run(run.pk).status == "completed"
