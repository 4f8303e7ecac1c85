from __future__ import annotations

import base64
import json
from datetime import timedelta
from itertools import islice, product
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import cancel_run, pause_run, run_agent, start_run, tool
from agentruns.agents.agent import Agent
from agentruns.engine.leases import claim
from agentruns.models import Approval, Run, Session
from agentruns.providers.names import model_identity
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user, refused
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
        "lease_expires_at", "not_before", "priority", "attempts",
        "blocked_reason", "imported_at", "created_at", "updated_at", "origin", "origin_seq", "parent",
        "waits_for", "untrusted",
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
    _, run = Api(make_user("staff", "view_run")).get(f"/runs/{run['id']}")
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
    assert Run.objects.count() == 1
    # Keys are each user's own.
    assert Api(make_user("other")).post("/runs", body)[0] == 201
    assert Session.objects.count() == 2


def test_a_busy_session_has_one_task_and_a_key_one_too(api: Api, shop: Agent) -> None:
    body = {"agent": "shop", "input": "one"}
    first, second = api.post("/runs", body)[1], api.post("/runs", body)[1]
    assert (first["id"] != second["id"], first["session"] != second["session"]) == (True, True)
    for more, kind in ({"session": "s1"}, "session-busy"), ({"idempotency_key": "k"}, "run-state"):
        status, run = api.post("/runs", {**body, **more})
        assert (status, api.post("/runs", {**body, **more})[0]) == (201, 200), "the same task, the same run"
        status, problem = api.post("/runs", {**body, **more, "input": "two"})
        assert (status, problem["type"], problem["run_id"]) == (409, f"urn:agentruns:{kind}", run["id"])
    assert problem["run_status"] == "queued"


def test_somebody_elses_session_reads_as_one_that_is_not_there(api: Api, shop: Agent) -> None:
    start_run(shop, "theirs", "s1", actor=make_user("other"))
    start_run(shop, "the program's", "s2")
    for session in ("s1", "s2"):
        status, problem = api.post("/runs", {"agent": "shop", "input": "mine", "session": session})
        assert (status, problem["type"]) == (404, "urn:agentruns:session-not-found")
        assert problem["detail"] == f"There is no session '{session}'."


def test_bad_fields_are_named(api: Api, shop: Agent) -> None:
    for field, value in (
        ("agent", None), ("agent", "x" * 101), ("input", " \n"), ("input", 7), ("session", ""),
        ("session", "a\x00b"), ("session", "a\ud800b"), ("session", "x" * 201),
        ("idempotency_key", "x" * 201), ("idempotency_key", "a\nb"), ("actor", "root"), ("owner", 1),
        ("odd\ud800", 1),
    ):  # fmt: skip
        status, problem = api.post("/runs", {"agent": "shop", "input": "hi", field: value})
        assert (status, problem["type"]) == (422, "urn:agentruns:validation")
        named = ["body"] if field.startswith("odd") else ["body", field]
        assert [error["loc"] for error in problem["errors"]] == [named]
    assert not Run.objects.exists()


def test_what_json_has_no_form_for_is_stored_as_it_is_and_answered_as_legal_json(
    api: Api, shop: Agent, owner: Any
) -> None:
    status, run = api.post("/runs", {"agent": "shop", "input": ODD})
    assert status == 201
    assert Run.objects.get().input == ODD
    shown = ODD.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert run["input"] == shown
    rows = api.get(f"/runs/{run['id']}/messages")[1]["items"]
    assert rows[1]["payload"]["content"] == [{"type": "text", "text": shown}]

    @tool
    def measure() -> dict[str, float]:
        """Measure."""
        return {"value": float("nan"), "high": float("inf")}

    agent = shop_agent("nan", {"tools": [call("measure")]}, tools=[measure])
    result = run_agent(agent, "measure", "s1", actor=owner)
    rows = api.get(f"/runs/{result.run_id}/messages")[1]["items"]
    assert rows[4]["payload"]["content"] == {"value": "NaN", "high": "Infinity"}


def test_a_priority_is_of_the_start_and_the_reason_of_a_wait_is_told(settings: Any) -> None:
    staff = Api(make_user("staff", "start_run", "view_run"))
    few, other = shop_agent("few", max_concurrent=1), shop_agent("other")
    made = [
        staff.post("/runs", {"agent": agent, "input": "x", **given})[1]
        for agent, given in (("few", {}), ("few", {"priority": "high"}), ("other", {"priority": "low"}))
    ]
    assert [run["priority"] for run in made] == ["normal", "high", "low"]
    assert staff.post("/runs", {"agent": "few", "input": "x", "priority": "urgent"})[0] == 422
    second, first, last = (UUID(run["id"]) for run in made)
    reasons = {UUID(run["id"]): run["blocked_reason"] for run in staff.get("/runs")[1]["items"]}
    before = "Waits for its turn: {} before it.".format
    assert reasons == {first: "", second: before(1), last: before(2)}
    with CaptureQueriesContext(connection) as queries:
        status, body = staff.get(f"/runs/{last}")
    assert (status, body["blocked_reason"]) == (200, before(2))
    assert sum("ROW_NUMBER" in query["sql"] for query in queries.captured_queries) == 1
    assert claim("default", first, few.name)
    full = "Waits for its turn: the agent's limit of 1 runs at once is reached."
    assert staff.get(f"/runs/{second}")[1]["blocked_reason"] == full
    assert staff.get(f"/runs/{last}")[1]["blocked_reason"] == before(1)
    owner = Api(make_user("owner", "start_run"))
    mine = owner.post("/runs", {"agent": other.name, "input": "x"})[1]
    assert owner.get(f"/runs/{mine['id']}")[1]["blocked_reason"] == "", "how much others do is not theirs"


def test_list_filters(api: Api, shop: Agent, owner: Any) -> None:
    shop_agent("plain")
    done = run_agent("plain", "hi", "s1", actor=owner)
    queued = start_run("plain", "hi", "s2", actor=owner)
    waiting = start_run(shop, "hi", "s3", actor=owner)
    everything = [str(waiting.pk), str(queued.pk), done.run_id]
    assert ids(api) == everything
    assert ids(api, status="completed") == [done.run_id]
    assert ids(api, agent="shop") == [str(waiting.pk)]
    assert ids(api, session="s2") == [str(queued.pk)]
    assert ids(api, agent="plain", status="queued") == [str(queued.pk)]
    assert ids(api, agent="<none>") == []
    for query in ({"status": "done"}, {"agent": "a\x00"}, {"session": "\x00"}, {"session": ""}):
        status, problem = api.get("/runs", **query)
        assert (status, problem["errors"][0]["loc"]) == (422, ["query", *query])


def ids(api: Api, **query: str) -> list[str]:
    status, body = api.get("/runs", **query)
    assert (status, body["next"]) == (200, None)
    return [item["id"] for item in body["items"]]


def test_messages_are_the_journal_in_order(owner: Any) -> None:
    api = Api(make_user("staff", "view_run"))
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


def test_messages_come_in_pages_and_the_state_is_that_at_a_row(
    api: Api, shop: Agent, owner: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 2)
    run = Run.objects.get(pk=run_agent(shop, "refund", "s1", actor=owner).run_id)
    seen = [row["seq"] for row in api.every(f"/runs/{run.pk}/messages", "after")]
    assert seen == list(run.messages.order_by("seq").values_list("seq", flat=True))
    path = f"/runs/{run.pk}/state"
    status, now = api.get(path)
    assert (status, now["run"], now["status"]) == (200, str(run.pk), run.status)
    status, then = api.get(path, at="2")
    assert (status, then["status"], then["step"], then["calls"]) == (200, "active", 0, [])
    assert [api.get(path, at="99")[0], api.get(path, at="-1")[0]] == [409, 422]
    assert Api(make_user("other")).get(path)[0] == 404


def test_cancel_records_and_a_second_one_says_who_and_when(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "refund", "s1", actor=owner)
    assert Api(make_user("viewer", "view_run")).post(f"/runs/{run.pk}/cancel")[0] == 403
    status, body = api.post(f"/runs/{run.pk}/cancel", {"reason": "never mind"})
    assert (status, body["status"]) == (200, "cancelled")
    closing = run.messages.order_by("seq").last()
    assert closing is not None
    assert closing.payload["actor"] == {"id": str(owner.pk), "name": "owner"}
    assert closing.payload["reason"] == "never mind"
    problem = refused(api.post(f"/runs/{run.pk}/cancel"), 409, "run-state")
    assert (problem["run_id"], problem["run_status"]) == (str(run.pk), "cancelled")
    assert (problem["ended_by"], problem["ended_by_name"]) == (str(owner.pk), "owner")
    assert problem["ended_at"] == closing.created_at.isoformat(timespec="microseconds")[:-6] + "Z"


def test_resume_needs_its_permission_and_only_queues(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "refund", "s1", actor=owner)
    pause_run(run.pk, None, reason="lunch")
    refused(api.post(f"/runs/{run.pk}/resume"), 403, "permission-denied")
    staff = Api(make_user("staff", "resume_run", "view_run"))
    status, body = staff.post(f"/runs/{run.pk}/resume")
    assert (status, body["status"], body["blocked_reason"]) == (200, "queued", "")
    assert run.messages.count() == 5  # started, user, pause requested, paused, resumed
    assert run.messages.order_by("seq").last().payload["actor"]["name"] == "staff"


def test_resume_of_a_run_that_is_live_or_ended(api: Api, shop: Agent) -> None:
    user = make_user("boss", "resume_run", "cancel_run")
    boss = Api(user)
    run = start_run(shop, "refund", "s1", actor=user)
    assert claim("default", run.pk) is not None
    problem = refused(boss.post(f"/runs/{run.pk}/resume"), 409, "session-busy")
    assert problem["run_id"] == str(run.pk)
    assert problem["lease_expires_at"].endswith("Z")
    # A cancel of a live run is recorded; its worker ends it.
    status, body = boss.post(f"/runs/{run.pk}/cancel")
    assert (status, body["status"]) == (200, "running")
    ended = start_run(shop, "refund", "s2", actor=user)
    assert boss.post(f"/runs/{ended.pk}/cancel")[1]["status"] == "cancelled"
    problem = refused(boss.post(f"/runs/{ended.pk}/resume"), 409, "run-state")
    assert UUID(problem["run_id"]) == ended.pk


def test_resume_of_a_waiting_run_returns_it(pending: Any) -> None:
    boss = Api(make_user("boss", "resume_run", "view_run"))
    status, body = boss.post(f"/runs/{pending().run_id}/resume")
    assert (status, body["status"]) == (200, "awaiting-approval")


# Pages

ID = "01a20062-a3cc-73dc-8419-c54ab3a43655"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 3)
    return Api(make_user("root", is_superuser=True))


def walk(api: Api, path: str, **query: Any) -> list[str]:
    """Follow `next` to the end, and list the ids."""
    pages = list(api.pages(path, **query))
    assert all(len(page) <= 3 for page in pages)
    return [item["id"] for page in pages for item in page]


def start(shop: Agent, count: int) -> list[Run]:
    return apart([start_run(shop, "hi", f"s{number}") for number in range(count)], "updated_at")


def apart(rows: list[Any], column: str) -> list[Any]:
    """Date rows a minute apart: a process may find that its time of the database was some ms ahead."""
    for number, row in enumerate(rows):
        setattr(row, column, getattr(row, column) + timedelta(minutes=number - len(rows)))
        row.save(update_fields=[column])
    return rows


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9, 10])
def test_every_run_comes_once_newest_first(root: Api, shop: Agent, count: int) -> None:
    runs = start(shop, count)
    assert walk(root, "/runs") == [str(run.pk) for run in reversed(runs)]


def test_runs_of_one_instant_come_in_the_order_of_their_ids(root: Api, shop: Agent) -> None:
    """SQLite keeps times as text of different lengths, depending on who wrote them."""
    runs = start(shop, 7)
    for microsecond in (0, 120_000, 123_456):
        Run.objects.update(updated_at=timezone.now().replace(microsecond=microsecond))
        assert walk(root, "/runs") == sorted((str(run.pk) for run in runs), reverse=True)
        if connection.vendor == "sqlite":
            shorter = "UPDATE agentruns_run SET updated_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f', updated_at)"
            with connection.cursor() as cursor:
                cursor.execute(f"{shorter} WHERE id > %s", [runs[3].pk.hex])
            assert sorted(walk(root, "/runs")) == sorted(str(run.pk) for run in runs)


def test_changing_runs_are_never_seen_twice_and_unchanged_ones_always(root: Api, shop: Agent) -> None:
    runs, seen = start(shop, 12), []
    changing = iter([runs[0], runs[11], runs[1], start_run(shop, "hi", "new")])
    for page in root.pages("/runs"):
        seen += [item["id"] for item in page]
        for run in islice(changing, 1):
            cancel_run(run.pk)
    assert len(seen) == len(set(seen)) > 9
    assert {str(run.pk) for run in runs[2:]} <= set(seen)


def test_filters_hold_on_every_page_and_a_cursor_shows_no_more_than_one_may_see(
    root: Api, shop: Agent
) -> None:
    runs = start(shop, 8)
    for run in runs[::2]:
        cancel_run(run.pk)
    assert walk(root, "/runs", status="queued") == [str(run.pk) for run in reversed(runs[1::2])]
    cursor = root.get("/runs")[1]["next"]
    assert Api(make_user("stranger")).get("/runs", cursor=cursor)[1] == {"items": [], "next": None}


def test_approvals_come_in_pages_too(root: Api, pending: Any) -> None:
    approvals = apart([pending(f"s{number}") for number in range(7)], "requested_at")
    assert walk(root, "/approvals") == [str(approval.pk) for approval in reversed(approvals)]
    Approval.objects.update(requested_at=timezone.now())
    assert len(set(walk(root, "/approvals", status="pending"))) == 7


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


BAD = [
    "", "x", "?", "\x00", "\u00e9", "[" * 3000, "AAAA", encoded(None), encoded(7), encoded([]),
    encoded("ab"), encoded(["0001-01-01 00:00:00+23:59", ID]), encoded(["9999-12-31 23:59:59-23:59", ID]),
    encoded(["2026-01-01", "no uuid"]), encoded(["no time", ID]), encoded(["2026-13-01 00:00:00", ID]),
    encoded([1, 2]), encoded(["2026-01-01 00:00:00", ID, 3]), encoded(["2026-01-01 00:00:00", [ID]]),
    encoded(["2026-01-01 00:00:00\x00", ID]), encoded(["\ud800", ID]),
]  # fmt: skip


def test_a_bad_or_made_up_cursor_is_refused(root: Api, shop: Agent) -> None:
    for cursor, path in product(BAD, ("/runs", "/approvals")):
        refused(root.get(path, cursor=cursor), 400, "bad-cursor")
    start(shop, 4)
    cursor = root.get("/runs")[1]["next"]
    assert root.get("/runs", cursor=cursor)[0] == 200
    body, _, signature = cursor.rpartition(":")
    for made_up in (body, f"{body}:{signature[:-1]}", f"x{cursor}", encoded(["2026-01-01 00:00:00", ID])):
        assert root.get("/runs", cursor=made_up)[0] == 400


def test_the_number_of_queries_does_not_grow(pending: Any) -> None:
    user = make_user("staff", "view_run", "decide_approval")
    for number in range(3):
        approval, asked = pending(f"s{number}"), []
        run = f"/runs/{approval.run_id}"
        for path in ("/runs", run, f"{run}/messages", "/approvals", f"/approvals/{approval.pk}"):
            api = Api(user)
            with CaptureQueriesContext(connection) as queries:
                assert api.get(path)[0] == 200
            asked.append(len(queries))
        # The session, the user, their own and their groups' permissions; then what is asked for, and the
        # definitions that its session has named, by which it is masked. Those of agents here are known. Of
        # runs also the events that they wait for, of cards the messages that came since, of all at once; of
        # one run also what it has read.
        assert asked == [7, 8, 7, 7, 7]
