"""Values that a tool declares sensitive, shown to somebody who may not reveal them."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from agentruns import Policy, approve, run_agent, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Message
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.files import fetch_secretly, fetched
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

PIN = "pin-Q77001x"


@tool(requires_approval=True, sensitive=["pin"])
def unlock(pin: str) -> str:
    """Open a door."""
    return "open"


def reader(*more: str) -> Api:
    return Api(make_user("reader", "view_run", "view_approval", *more, is_staff=True))


def unlocking(task: str = "open it", **options: Any) -> Any:
    agent = shop_agent("doors", {"tools": [call("unlock", pin=PIN)]}, tools=[unlock])
    return run_agent(agent, task, "s1", **options)


def test_a_fork_from_before_the_call_does_not_unmask_the_task() -> None:
    run = unlocking(f"open with {PIN}", actor=make_user("customer"))
    api = reader("fork_run", "start_run")
    assert PIN not in str(api.get(f"/runs/{run.run_id}"))
    status, fork = api.post(f"/runs/{run.run_id}/fork", {"at": 2})
    assert status == 201
    assert PIN not in str(fork)


def test_a_context_that_repeats_a_value_is_masked() -> None:
    run = unlocking(context={"pin": PIN})
    api = reader()
    assert PIN not in str(api.get(f"/runs/{run.run_id}/messages"))
    assert PIN not in str(api.get(f"/runs/{run.run_id}"))


def test_a_value_under_a_misspelt_name_is_masked() -> None:
    agent = shop_agent("doors", {"tools": [call("unlock", Pin=PIN)]}, tools=[unlock])
    run = run_agent(agent, "open it", "s1")
    assert PIN not in str(reader().get(f"/runs/{run.run_id}/messages"))


def test_an_error_of_a_tool_with_sensitive_results_is_masked() -> None:
    @tool(sensitive_results=["iban"])
    def look() -> dict[str, str]:
        """Look a customer up."""
        raise ValueError(f"the account {PIN} is blocked")

    run = run_agent(shop_agent("looks", {"tools": [call("look")]}, tools=[look]), "look", "s1")
    assert PIN not in str(reader().get(f"/runs/{run.run_id}/messages"))


def test_the_hash_of_a_guarded_task_is_not_shown(folder: Path, settings: Any) -> None:
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = 2_000
    task = "Dear agent. " * 300 + "The PIN is {}"
    agent = shop_agent("doors", {"tools": [call("unlock", pin="7306")]}, tools=[unlock])
    run = run_agent(agent, task.format("7306"), "s1")
    api = reader()
    assert api.get(f"/runs/{run.run_id}/messages/2/content")[0] == 403
    shown = json.dumps(api.get(f"/runs/{run.run_id}/messages")[1])
    pins = ("7305", "7306", "7307")
    hashes = {pin: hashlib.sha256(task.format(pin).encode()).hexdigest() for pin in pins}
    assert [pin for pin in pins if hashes[pin] in shown] == []


def test_the_console_shows_no_hash_that_the_api_hides(folder: Path) -> None:
    run = fetched(tools=[fetch_secretly])
    row = Message.objects.get(run=run, kind="tool_result")
    sha256, api = row.payload["stored"]["sha256"], reader()
    assert sha256 not in str(api.get(f"/runs/{run.pk}/messages"))
    page = api.client.get(f"/admin/agentruns/run/{run.pk}/rows/{row.seq}/content/")
    assert sha256 not in page.content.decode()


class Fails(Policy):
    """Its rule is broken: the kind of error that says what it could not handle."""

    is_broken = False

    def can_decide(self, user: Any, approval: Any, arguments: dict[str, Any]) -> bool:
        if Fails.is_broken:
            raise ValueError(f"no limit for {arguments['pin']}")
        return True


def logged(caplog: pytest.LogCaptureFixture) -> str:
    form = logging.Formatter()
    return "\n".join(form.format(one) for one in caplog.records if one.name.startswith("agentruns"))


@pytest.mark.parametrize("where", ["decision", "edit", "engine"])
def test_a_policy_that_raises_logs_no_value(
    where: str, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Fails"
    (card,) = unlocking().pending
    decider = make_user("decider", "decide_approval")
    if where == "engine":
        approve(card.pk, decider)
    monkeypatch.setattr(Fails, "is_broken", True)
    if where == "engine":
        sweep()
    else:
        edited = {"arguments": {"pin": PIN}} if where == "edit" else {}
        Api(decider).post(f"/approvals/{card.pk}/approve", {"digest": card.digest, **edited})
    assert "AGENTRUNS_POLICY failed" in logged(caplog)
    assert PIN not in logged(caplog)


@tool(sensitive=["pin"])
def open_late(pin: str) -> str:
    """Open a door, and do not know whether it opened."""
    raise ToolDurabilityError("no answer of the door")


def test_what_staff_wrote_of_a_run_is_masked_in_its_history() -> None:
    staff, client = make_user("staff", is_superuser=True, is_staff=True), Client()
    client.force_login(staff)
    reads = reader().client
    waits = unlocking().run_id
    form = {"action": "cancel_selected", "_selected_action": [waits], "reason": f"not with {PIN}"}
    seen = str(Message.objects.filter(run_id=waits).latest("seq").seq)
    page = client.post("/admin/agentruns/run/", {**form, "confirmed": "1", f"seen-{waits}": seen})
    assert b"1 was done" in page.content
    agent = shop_agent("late", {"tools": [call("open_late", pin=PIN)]}, tools=[open_late])
    doubt = run_agent(agent, "open it", "s2")
    about = {"verdict": "unknown", "evidence": f"nobody knows {PIN}"}
    about["seq"] = str(Message.objects.filter(run_id=doubt.run_id).latest("seq").seq)
    answer = client.post(f"/admin/agentruns/run/{doubt.run_id}/calls/{doubt.orphans[0]}/resolve/", about)
    assert answer.status_code == 302
    for run_id, said in ((waits, "not with"), (doubt.run_id, "nobody knows")):
        history = reads.get(f"/admin/agentruns/run/{run_id}/history/").content.decode()
        assert f"{said} ***" in history
        assert PIN not in history
