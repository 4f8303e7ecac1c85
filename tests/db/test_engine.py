from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, approve, deny, run_agent, start_run
from agentruns.models import Message, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from tests.db.helpers import names, payloads, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_run_with_one_call_and_repeating_it_is_the_same_run(effects: Effects) -> None:
    agent = shop_agent("one", {"tools": [call("post", text="hi")]})
    result = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    assert (result.status, result.output) == ("completed", "all done")
    assert run_agent(agent, "say hi", "s1", idempotency_key="k1").run_id == result.run_id
    assert effects.count() == 1
    rows = Message.objects.filter(run_id=result.run_id).order_by("seq")
    assert list(rows.values_list("kind", flat=True)) == [
        "run_started", "user", "assistant", "tool_started", "tool_result", "assistant", "run_completed",
    ]  # fmt: skip
    check_messages(result.messages)
    the_run(result)


def test_a_gated_call_waits_and_runs_after_approval(effects: Effects) -> None:
    agent = shop_agent("gated", {"tools": [call("refund", cents=5000), call("post", text="refunded")]})
    result = run_agent(agent, "refund", "s1", idempotency_key="k1")
    assert (result.status, effects.count()) == ("awaiting-approval", 0)
    approve(result.pending[0].id, None, digest=result.pending[0].digest)
    assert sweep().completed == 1
    assert names(effects) == ["refund", "post"]
    the_run(result)


def test_a_denial_is_told_to_the_model_and_not_asked_again(effects: Effects) -> None:
    turn = {"tools": [call("refund", cents=5000)]}
    agent = shop_agent("denied", turn, turn)
    result = run_agent(agent, "refund", "s1", idempotency_key="k1")
    deny(result.pending[0].id, None, "too much")
    assert sweep().completed == 1
    run = the_run(result)
    assert (effects.count(), run.approvals.count()) == (0, 1)
    results = payloads(run, "tool_result")
    assert [(one["outcome"], one["is_error"]) for one in results] == [("denied", False)] * 2
    assert "too much" in results[1]["content"]


def test_start_queues_and_a_sweep_drives(effects: Effects) -> None:
    agent = shop_agent("queued", {"tools": [call("post", text="hi")]})
    run = start_run(agent, "say hi", "s1", idempotency_key="k1")
    assert (run.status, effects.count()) == ("queued", 0)
    assert (sweep().as_dict()["completed"], effects.count()) == (1, 1)


def test_a_fixed_session_is_made_on_first_use_and_goes_on() -> None:
    said: list[Any] = []
    model = ScriptedModel([lambda request: said.append(request.messages) or {"text": "noted"}])
    agent = Agent("bound", instructions="Remember.", model=model)
    for text in ("first", "second"):
        assert run_agent(agent, text, "room-7", idempotency_key=text).status == "completed"
    assert (Session.objects.get().key, Run.objects.count()) == ("room-7", 2)
    texts = [block["text"] for message in said[1] for block in message["content"]]
    assert texts == ["first", "noted", "second"]
