"""Items 72-86: another process finishes a run, loses nothing of it, and keeps to its definition."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import list_runs, resume_run, run_agent, start_run
from agentruns.journal.batch import Batch
from agentruns.journal.read import load
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.db.helpers import outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.seeds.dying import die_at, elsewhere
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def turns() -> list[dict[str, Any]]:
    """Return three steps that think, call and count tokens."""
    return [
        {
            "content": [
                {"type": "thinking", "thinking": f"step {number}", "signature": "c2ln"},
                {"type": "tool_use", "id": f"c{number}", "name": "lookup", "input": {"number": str(number)}},
            ],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 10 + number, "output_tokens": number},
        }
        for number in range(3)
    ]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", ["after_reply", "after_result"])
def test_item_74_what_is_recovered_is_what_would_have_been(
    point: str, nth: int, effects: Effects, agents: None
) -> None:
    smooth = run_turns(*turns(), session="smooth")
    died = die_at(point, shop_agent("died", *turns()), "died", nth=nth)
    result = resume_run(died.pk)
    assert (result.status, result.output) == (smooth.status, smooth.output)
    assert (result.messages, result.usage) == (smooth.messages, smooth.usage)
    runs = [the_run(one) for one in (smooth, result)]
    assert runs[0].step == runs[1].step == 4
    said = [[(row["content"], row["usage"]) for row in payloads(run, "assistant")] for run in runs]
    assert said[0] == said[1]


def test_item_75_each_step_is_durable_before_the_next_one_is_asked_for(
    effects: Effects, agents: None
) -> None:
    seen: list[list[str]] = []

    def ask(request: Any) -> dict[str, Any]:
        seen.append(elsewhere(lambda: list(Message.objects.order_by("seq").values_list("kind", flat=True))))
        return {"tools": [call("post", text="hi")]}

    run_agent(shop_agent("stepping", ask, ask, ask), "do it", "s1", idempotency_key="k")
    step = ["assistant", "tool_started", "tool_result"]
    assert seen == [["run_started", "user", *step * number] for number in range(3)]


def test_item_77_runs_are_listed_newest_first_with_what_one_needs(effects: Effects, agents: None) -> None:
    run_turns(session="old")
    waiting = run_turns({"tools": [call("refund", cents=5000)]}, session="waiting")
    queued = start_run(shop_agent("queued"), "later", "new", idempotency_key="k")
    assert [run.session.key for run in list_runs()] == ["new", "waiting", "old"]
    (row,) = list_runs(status="awaiting-approval")
    assert (str(row.pk), row.agent, row.input) == (waiting.run_id, "agent-waiting", "do it")
    assert (len(str(row.definition_id)), row.updated_at is None) == (64, False)
    assert [run.pk for run in list_runs(agent="queued", status="queued")] == [queued.pk]
    statuses = {"running", "paused", "awaiting-approval", "completed", "failed"}
    assert statuses < set(Run.Status.values)


@pytest.mark.parametrize("driver", ["sweep", "resume"])
def test_item_83_a_run_goes_on_under_the_version_it_was_started_with(
    driver: str, effects: Effects, agents: None
) -> None:
    old = shop_agent("helper", {"tools": [call("post", text="as v7 says")]}, version="7")
    run = start_run(old, "do it", "s1", idempotency_key="k")
    shop_agent("helper", {"tools": [call("charge", cents=1)]}, version="8")
    assert sweep().completed == 1 if driver == "sweep" else resume_run(run.pk).status == "completed"
    assert [(line["tool"], line["text"]) for line in effects.lines()] == [("post", "as v7 says")]
    assert Run.objects.get().version == "7"
    later = start_run("helper", "do it", "s2", idempotency_key="k2")
    assert later.version == "8"
    assert later.definition_id != run.definition_id


def test_item_86_rows_of_newer_code_are_passed_over(effects: Effects, agents: None) -> None:
    run = start_run(
        shop_agent("older", {"tools": [call("post", text="hi")]}), "do it", "s1", idempotency_key="k"
    )
    batch = Batch(load("default", run.session_id, run.pk))
    batch.add("invented_later", {"v": 99, "unheard": ["of"]})
    DatabaseStore().append(batch)
    assert sweep().completed == 1
    run = Run.objects.get()
    assert (problems(run.session_id), outcomes(run), effects.count()) == ([], ["ok"], 1)
