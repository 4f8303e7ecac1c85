"""The view of visitors and of customers: no names of staff, reasons, errors, usage or costs, at any door."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from agentruns import (
    Agent,
    Policy,
    ask_human,
    cancel_run,
    get_approval,
    read_result,
    run_agent,
    session_token,
    start_run,
    tool,
)
from agentruns.api.schemas import MessageOut
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.masking import Mask
from agentruns.journal.policy import visible_approvals
from agentruns.models import Approval, Run, Session, SessionBearer
from agentruns.models.kinds import KINDS, PUBLIC, public
from agentruns.services.approvals.decisions import answer, approve, deny
from agentruns.services.data.erasure import erase_payload
from agentruns.services.runs.control import pause_run, resolve_orphan
from agentruns.services.runs.lifecycle import resume_run
from agentruns.testing import ScriptedModel
from tests.api.http import Api, Program, make_user
from tests.db.helpers import user
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "visitor.md"
SECRET = re.compile(r"SECRET-\w+")
LONG = "SECRET-instruction " * 30_000  # in a file


@tool(requires_approval=True, approvals=2, approvers="SECRET-group")
def refund(cents: int) -> str:
    """Refund the customer."""
    return f"refunded {cents}"


@tool(safe_to_retry=True)
def lookup(number: str) -> str:
    """Fail with the text of a foreign system."""
    raise ValueError(f"SECRET-exception: {number}")


@tool
def ship(number: str) -> str:
    """Fail in doubt."""
    raise ConnectionError(f"SECRET-connection: {number}")


@tool(requires_approval=True, approvers="requester")
def confirm(number: str) -> str:
    """Ask the customer."""
    return number


@pytest.fixture
def story(folder: Path) -> Run:
    """A customer's run of which every row may tell something that only staff should read."""
    ann, staff = make_user("ann"), user("SECRET-staff", is_superuser=True)
    other = user("SECRET-other", is_superuser=True)
    turns: list[Any] = [
        {"tools": [call("lookup", number="1"), call("refund", cents=5), call("confirm", number="1")]},
        {"tools": [call("refund", cents=7), call("ask_human", question="Is it broken?")]},
        reads_all,
        {"tools": [call("ship", number="1")]},
        {"text": "I am done.", "usage": {"input_tokens": 10, "output_tokens": 5}},
    ]
    agent = Agent(
        "shop",
        instructions=instructions,
        tools=[refund, lookup, ship, confirm, ask_human, read_result],
        model=ScriptedModel(turns),
    )
    run_agent(agent, "help me", "s1", actor=ann)
    run = Run.objects.get()
    own, first = Approval.objects.order_by("tool_name")
    deny(own.pk, staff, "SECRET-own")
    approve(first.pk, staff, reason="SECRET-approval")
    approve(first.pk, other, arguments={"cents": 6}, reason="SECRET-edit")
    approve(first.pk, staff, reason="SECRET-approval", digest=Approval.objects.get(pk=first.pk).digest)
    pause_run(run.pk, actor=staff, reason="SECRET-pause")
    resume_run(run.pk, actor=staff)
    second, question = Approval.objects.filter(status="pending").order_by("tool_name")[::-1]
    deny(second.pk, staff, "SECRET-denial")
    answer(question.pk, staff, "SECRET-answer")
    resume_run(run.pk)
    run.refresh_from_db()
    doubt = run.messages.get(kind="tool_result", tool_name="ship")
    resolve_orphan(
        run.pk, doubt.call_id, "occurred", staff, result="SECRET-result", evidence="SECRET-evidence"
    )
    later = start_run(agent, "and more", "s1", actor=ann, context={"note": "for tools"})
    cancel_run(later.pk, actor=staff, reason="SECRET-cancel")
    erase_payload(later.pk, later.messages.get(kind="user").seq, staff, "SECRET-erasure")
    Run.objects.filter(pk=run.pk).update(blocked_reason="SECRET-blocked", error="SECRET-error")
    run.refresh_from_db()
    return run


def reads_all(request: Any) -> dict[str, Any]:
    """Read each result again, as a visitor who knows the ids may ask of the model."""
    blocks = [block for message in request.messages for block in message["content"]]
    return {"tools": [call("read_result", result=each["id"]) for each in blocks if each.get("id")]}


def instructions(run: Any) -> str:
    return LONG


def doors(reader: Api) -> str:
    """Read all that a reader of runs may ask for, and return it as one text."""
    texts = []
    for pk in Run.objects.values_list("pk", flat=True):
        (started,) = Run.objects.get(pk=pk).messages.filter(kind="run_started").values_list("seq", flat=True)
        more = ("", "/messages", "/state", "/events", f"/messages/{started}/content")
        texts += [f"/runs/{pk}{each}" for each in more]
    texts += ["/runs", "/sessions", "/sessions/s1", "/sessions/s1/messages", "/approvals"]
    texts += [f"/approvals/{pk}" for pk in Approval.objects.values_list("pk", flat=True)]
    answers = [reader.client.get(f"/api{path}") for path in texts]
    said = "".join(answer.getvalue().decode() for answer in answers)
    for approval in Approval.objects.all():  # errors, too
        said += json.dumps(reader.post(f"/approvals/{approval.pk}/deny", {"digest": "x", "reason": "no"}))
    for pk in Run.objects.values_list("pk", flat=True):
        said += json.dumps(reader.post(f"/runs/{pk}/cancel", {}))
    return said


def test_neither_a_visitor_nor_a_customer_reads_what_is_staff_s(story: Run) -> None:
    visitor = Program(session_token(Session.objects.get(), timedelta(hours=1)))
    customer = Api(story.owner)
    for reader in (visitor, customer):
        said = doors(reader)
        assert set(SECRET.findall(said)) == set()
        assert "I am done." in said
        assert "refunded 6" in said  # what the tool returned
        run = reader.get(f"/runs/{story.pk}")[1]
        hidden = {name: run[name] for name in ("usage", "tokens", "cost", "error", "blocked_reason")}
        assert hidden == {"usage": {}, "tokens": None, "cost": None, "error": "", "blocked_reason": ""}
    assert "ann" not in json.dumps(visitor.get("/sessions/s1")) + json.dumps(visitor.get("/sessions"))
    assert customer.get(f"/runs/{story.pk}")[1]["owner_name"] == "ann"
    told = "approval blocked cancel denial edit erasure error evidence exception group instruction other own"
    told += " pause result staff"
    boss = Api(make_user("boss", is_superuser=True))
    assert {each.removeprefix("SECRET-") for each in SECRET.findall(doors(boss))} >= {*told.split()}


def test_a_page_of_the_project_gives_them_no_more(story: Run) -> None:
    def seen(reader: Any) -> str:
        given = [get_approval(each.pk, reader) for each in visible_approvals(reader)]
        assert {each.approval.run.agent for each in given} == {"shop"}
        assert not [each for each in given if each.approval.run.context or each.approval.run.session_id]
        return repr([(vars(each.approval), vars(each.approval.run), *each) for each in given])

    for reader in (story.owner, SessionBearer(story.session_id)):
        assert set(SECRET.findall(seen(reader))) == set()
        assert ("'ann'" in seen(reader)) is (reader == story.owner)
    boss = make_user("boss", is_superuser=True)
    assert {*SECRET.findall(seen(boss))} >= {f"SECRET-{each}" for each in ("denial", "group", "own", "staff")}


class MonitorsOne(Policy):
    task = ""

    def can(self, user: Any, action: str, obj: Any) -> bool:
        return super().can(user, action, obj) or (action == "monitor" and obj.input == self.task)


def test_of_a_conversation_each_run_is_judged_by_itself(settings: Any) -> None:
    ann, staff = make_user("ann"), user("staff", is_superuser=True)
    agent = Agent("plain", instructions="Serve.", tools=[], model=ScriptedModel([]))
    for task in ("one", "two"):
        cancel_run(start_run(agent, task, "s1", actor=ann).pk, actor=staff, reason=f"SECRET-{task}")
    settings.AGENTRUNS_POLICY = f"{__name__}.MonitorsOne"
    for MonitorsOne.task in ("one", "two"):
        said = json.dumps(Api(ann).get("/sessions/s1/messages"))
        assert SECRET.findall(said) == [f"SECRET-{MonitorsOne.task}"]
        assert said.count("The run was cancelled.") == 1


def test_who_may_view_runs_gets_another_tag(story: Run) -> None:
    customer = Api(story.owner)
    customer.get(f"/runs/{story.pk}")
    tag = customer.response["ETag"]
    staff = Api(make_user("viewer", "view_run"))
    assert staff.client.get(f"/api/runs/{story.pk}", headers={"If-None-Match": tag}).status_code == 200


def test_the_page_lists_what_they_read_by_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {kind: {*re.findall(r"`([\w.]+)`", names)} for kind, names in rows}
    assert listed == {str(kind): {*kind.public} - {*PUBLIC} for kind in KINDS.values()}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_new_member_is_hidden_until_it_is_listed(kind: str) -> None:
    inner = {"type": "text", "text": "x", "thinking": "SECRET-thought", "new": "SECRET-new"}
    payload: dict[str, Any] = dict.fromkeys(KINDS[kind].payload.__annotations__, "x")
    payload |= {"content": [inner], "calls": [inner]}
    payload |= {"v": 1, "new": "SECRET-new", "outcome": "ok", "is_error": False, "reason": "SECRET-reason"}
    seen = public(kind, payload, "pay")
    assert seen.keys() <= {path.partition(".")[0] for path in KINDS[kind].public}
    open_kinds = {events.USER, events.TOOL_RESULT}  # whose whole content is the customer's
    assert kind in open_kinds or not SECRET.search(json.dumps(seen))


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        *(("tool_result", {"outcome": each}) for each in ("error", "denied", "answered", "newer")),
        ("tool_result", {"outcome": "ok", "is_error": True}),
        ("tool_result", {"outcome": "ok", "actor": {"id": "3", "name": "jane"}}),
        ("tool_result", {"outcome": "ok", "actor": None}),
        ("user", {"reason": "output_invalid"}),
        ("of newer code", {}),
    ],
)
def test_what_the_program_or_a_person_wrote_is_no_content_for_them(kind: str, facts: dict[str, Any]) -> None:
    seen = public(kind, {"v": 1, "content": "SECRET-x", "stored": [{"sha256": "x"}], **facts}, "pay")
    assert not {"content", "stored"} & seen.keys()


def test_a_value_that_staff_edited_is_masked_although_the_edit_is_hidden() -> None:
    mask = Mask([{"tools": {"pay": {"sensitive": ["pin"]}}}])
    run: Any = SimpleNamespace(shows_all=False, session=SimpleNamespace(key="s1"))

    def seen(seq: int, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        row = Row(seq, uuid4(), kind, "", "pay", 1, 1, payload, datetime.now(UTC), "", "", None)
        return MessageOut.of(row, run, mask).payload

    assert seen(1, "approval_decided", {"verb": "approve", "arguments": {"pin": "771-204"}}) == {
        "verb": "approve"
    }
    said = [{"type": "text", "text": "I used 771-204."}]
    assert seen(2, "assistant", {"content": said, "calls": []})["content"][0]["text"] == "I used ***."
