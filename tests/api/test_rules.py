"""Standing rules through the API: read, drafted, tried, activated, stopped, retired, tried on the past."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from agentruns import approve, deny, session_token
from agentruns.models import Approval, ApprovalRule
from agentruns.services.api_tokens import create_token
from tests.api.http import Api, Program, make_user, refused
from tests.db.ruled import DAY, SMALL, paid, payer, ran, rule
from tests.effects import Effects
from tests.registry import isolated_registry

pytestmark = pytest.mark.django_db(transaction=True)

DRAFT = {"name": "small", "agent": "payer", "tool": "pay", "conditions": [SMALL], "caps": [DAY]}


@pytest.fixture(autouse=True)
def _registry_of_its_own() -> Iterator[None]:
    with isolated_registry():
        payer(500)
        yield


@pytest.fixture
def lead() -> Any:
    return make_user("lead", "view_approval", "write_rule", "activate_rule")


def test_a_rule_from_a_draft_to_its_end(lead: Any, effects: Effects) -> None:
    api = Api(lead)
    status, made = api.post("/rules", {**DRAFT, "expires_at": "2031-01-01T00:00:00Z"})
    assert (status, made["status"], made["version"], made["author"]) == (200, "draft", 1, str(lead.pk))
    assert made["sentence"].startswith(
        "Approve pay if cents is at most 5000, at most 10000 of cents per customer"
    )
    assert (made["conditions"], made["caps"], made["used"]) == ([SMALL], [DAY], ["0"])
    path = f"/rules/{made['id']}"
    assert api.post(f"{path}/dry-run")[1]["status"] == "dry-run"
    assert ran("s1").status == "awaiting-approval"
    assert api.post(f"{path}/activate", {})[1]["activator"] == str(lead.pk)
    assert ran("s2").status == "completed"
    assert paid(effects) == [500]
    assert api.get(path)[1]["used"] == ["500"]
    stopped = api.post(f"{path}/stop", {"reason": "wrong"})[1]
    assert (stopped["status"], stopped["why"]) == ("stopped", "wrong")
    assert ran("s3").status == "awaiting-approval"
    retired = api.post(f"{path}/retire")[1]
    states = [each["status"] for each in retired["changes"]]
    assert states == ["retired", "stopped", "active", "dry-run", "draft"]
    assert {each["actor_name"] for each in retired["changes"]} == {"lead"}
    problem = refused(api.post(f"{path}/activate"), 409, "rule-state")
    assert "it cannot become active" in problem["detail"]


def test_rules_are_listed_by_page_and_filter(lead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 2)
    names = ["a", "b", "c"]
    for name in names:
        rule(name=name, active=name == "c")
    api = Api(lead)
    assert [each["name"] for each in api.every("/rules")] == ["c", "b", "a"]
    assert [each["name"] for each in api.every("/rules", status="active")] == ["c"]
    assert api.every("/rules", agent="other") == api.every("/rules", tool="other") == []
    refused(api.get("/rules", status="odd"), 422, "validation")
    refused(api.get("/rules", cursor="odd"), 400, "bad-cursor")


def test_a_backtest_counts_as_the_service_does(lead: Any) -> None:
    one, two = (ran(key).approvals.get() for key in ("s1", "s2"))
    approve(one.pk, None)
    deny(two.pk, None, "no")
    path = f"/rules/{rule(active=False).pk}/backtest"
    status, done = Api(lead).post(path)
    counts = {name: done[name] for name in ("tried", "fits", "agreed", "disagreed", "capped", "left_out")}
    expected = {"tried": 2, "fits": 2, "agreed": 1, "disagreed": 1, "capped": 0, "left_out": 0}
    assert (status, counts) == (200, expected)
    assert done["disagreements"] == [{"approval": str(two.pk), "verdict": "denied"}]
    assert Api(lead).post(path, {"most": 1})[1]["tried"] == 1
    refused(Api(lead).post(path, {"most": 0}), 422, "validation")
    writer = make_user("writer", "write_rule")
    assert Api(writer).post(path)[1]["disagreements"] == [], "the writer may not see that card"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Small"}, {"conditions": [], "caps": []}, {"effect": "deny", "caps": []}, {"effect": "odd"},
        {"conditions": [{**SMALL, "path": "arguments.nothing"}]}, {"conditions": [{**SMALL, "op": "~"}]},
        {"conditions": [{**SMALL, "op": ["=="]}]}, {"conditions": [{"path": "requester", "op": "=="}]},
        {"caps": [{**DAY, "most": "-1"}]}, {"caps": [{**DAY, "seconds": 0}]},
        {"caps": [{**DAY, "of": "requester"}]},
        {"expires_at": "2020-01-01T00:00:00Z"}, {"untrusted": "perhaps"}, {"author": "1"},
    ],
)  # fmt: skip
def test_what_no_rule_can_say_is_422(lead: Any, change: dict[str, Any]) -> None:
    refused(Api(lead).post("/rules", DRAFT | change), 422, "validation")
    assert not ApprovalRule.objects.exists()


def test_an_agent_or_a_tool_that_is_not_here_is_404(lead: Any) -> None:
    refused(Api(lead).post("/rules", {**DRAFT, "agent": "gone"}), 404, "not-found")
    refused(Api(lead).post("/rules", {**DRAFT, "tool": "gone"}), 404, "not-found")


def test_who_may_not_write_rules_learns_nothing_of_agents(lead: Any) -> None:
    nobody = Api(make_user("nobody"))
    for change in ({}, {"agent": "gone"}, {"conditions": [{**SMALL, "path": "arguments.nothing"}]}):
        refused(nobody.post("/rules", DRAFT | change), 403, "permission-denied")
    made = rule()
    refused(nobody.get(f"/rules/{made.pk}"), 404, "not-found")
    refused(nobody.post(f"/rules/{made.pk}/stop"), 404, "not-found")
    refused(nobody.get("/rules/none"), 404, "not-found")
    assert nobody.get("/rules") == (200, {"items": [], "next": None})
    viewer = Api(make_user("viewer", "view_approvalrule"))
    assert viewer.get(f"/rules/{made.pk}")[0] == 200
    for act in ("dry-run", "activate", "stop", "retire", "backtest"):
        refused(viewer.post(f"/rules/{made.pk}/{act}"), 403, "permission-denied")


def test_tokens_need_their_scope_and_visitors_see_no_rules(lead: Any) -> None:
    made, run = rule(), ran("s1")
    path = f"/rules/{made.pk}"
    reads, writes = (Program(create_token(lead, [scope])[1]) for scope in ("runs:read", "rules:write"))
    assert reads.get(path)[0] == 200
    assert refused(reads.post(f"{path}/stop"), 403, "scope")["scopes"] == ["rules:write"]
    assert refused(writes.get(path), 403, "scope")["scopes"] == ["runs:read"]
    other = Program(create_token(lead, ["runs:write", "approvals:decide"])[1])
    refused(other.post("/rules", DRAFT), 403, "scope")
    assert writes.post(f"{path}/stop")[1]["status"] == "stopped"
    visitor = Program(session_token(run.session, timedelta(minutes=5)))
    refused(visitor.get("/rules"), 403, "scope")
    refused(visitor.post("/rules", DRAFT), 403, "scope")


def test_a_repeated_request_changes_nothing_again(lead: Any) -> None:
    api = Api(lead)
    given = {**DRAFT, "expires_at": "2031-01-01T00:00:00Z", "idempotency_key": "k1"}
    first, again = (api.post("/rules", given)[1] for _time in "12")
    assert (first["id"], ApprovalRule.objects.count()) == (again["id"], 1)
    assert api.response["Idempotency-Replayed"] == "true"
    refused(api.post("/rules", {**DRAFT, "name": "other", "idempotency_key": "k1"}), 409, "idempotency-key")
    path = f"/rules/{first['id']}"
    for _time in "12":
        assert api.post(f"{path}/activate", {"idempotency_key": "k2"})[1]["status"] == "active"
    assert api.post(f"{path}/backtest", {"idempotency_key": "k3"}) == api.post(
        f"{path}/backtest", {"idempotency_key": "k3"}
    )
    refused(api.post(f"{path}/activate"), 409, "rule-state")


def test_a_rule_that_expired_or_whose_tool_changed_is_409(lead: Any) -> None:
    made = rule(active=False, expires_at=timezone.now() + timedelta(days=1))
    ApprovalRule.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert "expired" in refused(Api(lead).post(f"/rules/{made.pk}/activate"), 409, "rule-state")["detail"]
    ApprovalRule.objects.update(expires_at=None, schema="of other parameters")
    for act in ("activate", "dry-run"):
        problem = refused(Api(lead).post(f"/rules/{made.pk}/{act}"), 409, "rule-state")
        assert "Write a new version" in problem["detail"]
    assert not Approval.objects.exists()
