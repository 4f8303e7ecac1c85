from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from agentruns import run_agent, start_run
from agentruns.agents.agent import Agent
from agentruns.models import Run, Session
from agentruns.providers.names import model_identity
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ODD = "nul \x00, dle \x10, surrogate \ud800, emoji \U0001f600, <script>alert(1)</script>\u2028"


def test_start_queues_a_run_and_drives_nothing(api: Api, shop: Agent, owner: Any, effects: Effects) -> None:
    body = {"agent": "shop", "input": "refund it", "session": "s1", "idempotency_key": "k1"}
    status, run = api.post("/runs", body)
    assert status == 201
    assert set(run) == {
        "id", "session", "owner", "owner_name", "agent", "version", "definition", "idempotency_key", "status",
        "input", "step", "usage", "tokens", "cost", "output", "error", "scope", "title", "context",
        "lease_expires_at", "not_before", "attempts",
        "blocked_reason", "imported_at", "created_at", "updated_at", "origin", "origin_seq",
    }  # fmt: skip
    assert (run["status"], run["session"], run["owner"]) == ("queued", "s1", str(owner.pk))
    assert (run["input"], run["output"], run["step"]) == ("refund it", None, 0)
    stored = Run.objects.get()
    assert (run["id"], run["definition"]) == (str(stored.pk), stored.definition_id)
    assert run["created_at"] == stored.created_at.isoformat().replace("+00:00", "Z")
    assert stored.messages.count() == 2
    assert effects.count() == 0


def test_the_cost_is_with_the_usage(api: Api, settings: Any) -> None:
    agent = shop_agent("priced", {"text": "done", "usage": {"input_tokens": 10, "output_tokens": 5}})
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 3, "output": 15}}
    _, run = api.post("/runs", {"agent": "priced", "input": "hello", "idempotency_key": "k1"})
    sweep()
    _, run = api.get(f"/runs/{run['id']}")
    assert run["usage"] == {"input_tokens": 10, "output_tokens": 5, "cost": "0.000105"}


def test_the_same_key_is_the_same_run_for_ever(api: Api) -> None:
    shop_agent("plain")
    body = {"agent": "plain", "input": "hello", "idempotency_key": "k1"}
    status, first = api.post("/runs", body)
    assert status == 201
    assert api.post("/runs", body) == (200, first)
    sweep()
    status, again = api.post("/runs", body)
    assert (status, again["id"], again["status"]) == (200, first["id"], "completed")
    assert again["output"] == "all done"
    # It is not the run of a session that it is not in.
    assert api.post("/runs", {**body, "session": "elsewhere"})[0] == 409
    assert api.post("/runs", {**body, "session": first["session"]})[0] == 200
    assert Run.objects.count() == 1


def test_a_key_belongs_to_its_owner(api: Api, shop: Agent) -> None:
    body = {"agent": "shop", "input": "refund it", "idempotency_key": "k1"}
    other = Api(make_user("other"))
    assert api.post("/runs", body)[0] == other.post("/runs", body)[0] == 201
    assert Session.objects.count() == 2


def test_without_a_session_each_request_gets_its_own(api: Api, shop: Agent) -> None:
    body = {"agent": "shop", "input": "refund it"}
    first, second = api.post("/runs", body)[1], api.post("/runs", body)[1]
    assert first["id"] != second["id"]
    assert first["session"] != second["session"]


def test_the_same_task_in_an_unfinished_session_is_the_same_run(api: Api, shop: Agent) -> None:
    body = {"agent": "shop", "input": "refund it", "session": "s1"}
    assert [api.post("/runs", body)[0] for _ in range(2)] == [201, 200]


def test_a_busy_session_is_a_conflict_that_names_the_run(api: Api, shop: Agent) -> None:
    run = api.post("/runs", {"agent": "shop", "input": "one", "session": "s1"})[1]
    status, problem = api.post("/runs", {"agent": "shop", "input": "two", "session": "s1"})
    assert (status, problem["type"]) == (409, "urn:agentruns:session-busy")
    assert problem["run_id"] == run["id"]


def test_a_key_of_another_task_is_a_conflict_that_names_the_run(api: Api, shop: Agent) -> None:
    run = api.post("/runs", {"agent": "shop", "input": "one", "idempotency_key": "k"})[1]
    status, problem = api.post("/runs", {"agent": "shop", "input": "two", "idempotency_key": "k"})
    assert (status, problem["type"]) == (409, "urn:agentruns:run-state")
    assert (problem["run_id"], problem["run_status"]) == (run["id"], "queued")


def test_somebody_elses_session_reads_as_one_that_is_not_there(api: Api, shop: Agent) -> None:
    start_run(shop, "theirs", "s1", actor=make_user("other"))
    start_run(shop, "the program's", "s2")
    for session in ("s1", "s2"):
        status, problem = api.post("/runs", {"agent": "shop", "input": "mine", "session": session})
        assert (status, problem["type"]) == (404, "urn:agentruns:session-not-found")
        assert problem["detail"] == f"There is no session '{session}'."


def test_an_unknown_agent_is_a_validation_error(api: Api, shop: Agent) -> None:
    status, problem = api.post("/runs", {"agent": "nobody", "input": "hi"})
    assert (status, problem["type"]) == (422, "urn:agentruns:unknown-agent")
    assert "shop" in problem["detail"]
    assert not Session.objects.exists()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"agent": None}, ["body", "agent"]),
        ({"agent": "x" * 101}, ["body", "agent"]),
        ({"input": " \n"}, ["body", "input"]),
        ({"input": 7}, ["body", "input"]),
        ({"session": ""}, ["body", "session"]),
        ({"session": "a\x00b"}, ["body", "session"]),
        ({"session": "a\ud800b"}, ["body", "session"]),
        ({"session": "x" * 201}, ["body", "session"]),
        ({"idempotency_key": "x" * 201}, ["body", "idempotency_key"]),
        ({"idempotency_key": "a\nb"}, ["body", "idempotency_key"]),
        ({"actor": "root"}, ["body", "actor"]),
        ({"owner": 1}, ["body", "owner"]),
        ({"odd\ud800": 1}, ["body"]),
    ],
)
def test_bad_fields_are_named(api: Api, shop: Agent, change: dict[str, Any], place: list[str]) -> None:
    status, problem = api.post("/runs", {"agent": "shop", "input": "hi", **change})
    assert (status, problem["type"]) == (422, "urn:agentruns:validation")
    assert [error["loc"] for error in problem["errors"]] == [place]
    assert not Run.objects.exists()


def test_odd_text_is_stored_as_it_is_and_answered_as_legal_json(api: Api, shop: Agent) -> None:
    status, run = api.post("/runs", {"agent": "shop", "input": ODD})
    assert status == 201
    assert Run.objects.get().input == ODD
    shown = ODD.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert run["input"] == shown
    rows = api.get(f"/runs/{run['id']}/messages")[1]["items"]
    assert rows[1]["payload"]["content"] == [{"type": "text", "text": shown}]


def test_a_large_input_and_one_too_large(api: Api, shop: Agent, settings: Any) -> None:
    assert api.post("/runs", {"agent": "shop", "input": "x" * 2_000_000})[0] == 201
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    status, problem = api.post("/runs", {"agent": "shop", "input": "x" * 2000})
    assert (status, problem["type"]) == (413, "urn:agentruns:too-large")


def test_list_filters(api: Api, shop: Agent, owner: Any) -> None:
    shop_agent("plain")
    done = run_agent("plain", "hi", "s1", actor=owner)
    queued = start_run("plain", "hi", "s2", actor=owner)
    waiting = start_run(shop, "hi", "s3", actor=owner)
    everything = [str(waiting.pk), str(queued.pk), done.run_id]
    assert ids(api.get("/runs")) == everything
    assert ids(api.get("/runs", status="completed")) == [done.run_id]
    assert ids(api.get("/runs", agent="shop")) == [str(waiting.pk)]
    assert ids(api.get("/runs", session="s2")) == [str(queued.pk)]
    assert ids(api.get("/runs", agent="plain", status="queued")) == [str(queued.pk)]
    assert ids(api.get("/runs", agent="<none>")) == []
    for query in ({"status": "done"}, {"agent": "a\x00"}, {"session": "\x00"}, {"session": ""}):
        status, problem = api.get("/runs", **query)
        assert (status, problem["errors"][0]["loc"]) == (422, ["query", *query])


def ids(answer: tuple[int, Any]) -> list[str]:
    status, body = answer
    assert (status, body["next"]) == (200, None)
    return [item["id"] for item in body["items"]]


def test_messages_are_the_journal_in_order(api: Api, owner: Any) -> None:
    agent = shop_agent("poster", {"tools": [call("post", text="<b>hi</b>")]})
    result = run_agent(agent, "say hi", "s1", actor=owner)
    run = Run.objects.get(pk=result.run_id)
    status, body = api.get(f"/runs/{run.pk}/messages")
    assert status == 200
    rows = list(run.messages.order_by("seq"))
    assert [row["kind"] for row in body["items"]] == [row.kind for row in rows]
    shown, stored = body["items"][3], rows[3]
    assert shown == {
        "session": "s1", "run": str(run.pk), "seq": stored.seq, "kind": "tool_started",
        "call_id": stored.call_id, "tool_name": "post", "attempt": 1, "epoch": stored.epoch,
        "payload": stored.payload, "prev_hash": stored.prev_hash, "hash": stored.hash,
        "created_at": stored.created_at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
    }  # fmt: skip
    assert body["items"][2]["payload"]["calls"][0]["arguments"] == {"text": "<b>hi</b>"}
    later = api.get(f"/runs/{run.pk}/messages", after=rows[4].seq)[1]
    assert later["items"] == body["items"][5:]
    assert api.get(f"/runs/{run.pk}/messages", after=2**63 - 1)[1] == {"items": [], "next": None}
    for after in ("-1", "x", str(2**63), "1e99", "\x00"):
        assert api.get(f"/runs/{run.pk}/messages", after=after)[0] == 422


def test_messages_come_in_pages(api: Api, shop: Agent, owner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 2)
    run = Run.objects.get(pk=run_agent(shop, "refund", "s1", actor=owner).run_id)
    seen, query = [], {}
    while True:
        page = api.get(f"/runs/{run.pk}/messages", **query)[1]
        seen += [row["seq"] for row in page["items"]]
        if page["next"] is None:
            break
        query = {"after": page["next"]}
    assert seen == list(run.messages.order_by("seq").values_list("seq", flat=True))


def test_a_result_with_nan_is_legal_json(api: Api, owner: Any) -> None:
    from agentruns import tool

    @tool
    def measure() -> dict[str, float]:
        """Measure."""
        return {"value": float("nan"), "high": float("inf")}

    agent = shop_agent("nan", {"tools": [call("measure")]}, tools=[measure])
    result = run_agent(agent, "measure", "s1", actor=owner)
    rows = api.get(f"/runs/{result.run_id}/messages")[1]["items"]
    assert rows[4]["payload"]["content"] == {"value": "NaN", "high": "Infinity"}


def test_cancel_records_and_a_second_one_says_who_and_when(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "refund", "s1", actor=owner)
    status, body = api.post(f"/runs/{run.pk}/cancel", {"reason": "never mind"})
    assert (status, body["status"]) == (200, "cancelled")
    closing = run.messages.order_by("seq").last()
    assert closing is not None
    assert closing.payload["actor"] == {"id": str(owner.pk), "name": "owner"}
    assert closing.payload["reason"] == "never mind"
    status, problem = api.post(f"/runs/{run.pk}/cancel")
    assert (status, problem["type"]) == (409, "urn:agentruns:run-state")
    assert (problem["run_id"], problem["run_status"]) == (str(run.pk), "cancelled")
    assert (problem["ended_by"], problem["ended_by_name"]) == (str(owner.pk), "owner")
    assert problem["ended_at"] == closing.created_at.isoformat(timespec="microseconds")[:-6] + "Z"


def test_resume_needs_its_permission_and_only_queues(api: Api, shop: Agent, owner: Any) -> None:
    from agentruns import pause_run

    run = start_run(shop, "refund", "s1", actor=owner)
    pause_run(run.pk, None, reason="lunch")
    status, problem = api.post(f"/runs/{run.pk}/resume")
    assert (status, problem["type"]) == (403, "urn:agentruns:permission-denied")
    staff = Api(make_user("staff", "resume_run", "view_run"))
    status, body = staff.post(f"/runs/{run.pk}/resume")
    assert (status, body["status"], body["blocked_reason"]) == (200, "queued", "")
    assert run.messages.count() == 5  # started, user, pause requested, paused, resumed
    assert run.messages.order_by("seq").last().payload["actor"]["name"] == "staff"


def test_resume_of_a_run_that_is_live_or_ended(api: Api, shop: Agent) -> None:
    from agentruns.engine.leases import claim

    user = make_user("boss", "resume_run", "cancel_run")
    boss = Api(user)
    run = start_run(shop, "refund", "s1", actor=user)
    assert claim("default", run.pk) is not None
    status, problem = boss.post(f"/runs/{run.pk}/resume")
    assert (status, problem["type"]) == (409, "urn:agentruns:session-busy")
    assert problem["run_id"] == str(run.pk)
    assert problem["lease_expires_at"].endswith("Z")
    # A cancel of a live run is recorded; its worker ends it.
    status, body = boss.post(f"/runs/{run.pk}/cancel")
    assert (status, body["status"]) == (200, "running")
    ended = start_run(shop, "refund", "s2", actor=user)
    assert boss.post(f"/runs/{ended.pk}/cancel")[1]["status"] == "cancelled"
    status, problem = boss.post(f"/runs/{ended.pk}/resume")
    assert (status, problem["type"]) == (409, "urn:agentruns:run-state")
    assert UUID(problem["run_id"]) == ended.pk


def test_resume_of_a_waiting_run_returns_it(api: Api, pending: Any) -> None:
    boss = Api(make_user("boss", "resume_run", "view_run"))
    approval = pending()
    status, body = boss.post(f"/runs/{approval.run_id}/resume")
    assert (status, body["status"]) == (200, "awaiting-approval")


def test_the_state_at_a_row(api: Api, shop: Agent, owner: Any) -> None:
    run = api.post("/runs", {"agent": "shop", "input": "refund it", "session": "s1", "idempotency_key": "k"})[
        1
    ]
    sweep()
    status, now = api.get(f"/runs/{run['id']}/state")
    assert (status, now["run"], now["status"]) == (200, run["id"], Run.objects.get().status)
    status, then = api.get(f"/runs/{run['id']}/state", at="2")
    assert (status, then["status"], then["step"], then["calls"]) == (200, "active", 0, [])
    assert api.get(f"/runs/{run['id']}/state", at="99")[0] == 409
    assert api.get(f"/runs/{run['id']}/state", at="-1")[0] == 422
    assert Api(make_user("other")).get(f"/runs/{run['id']}/state")[0] == 404
