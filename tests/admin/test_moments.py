"""A run at any row: what it was, what the model was sent, a fork and a replay from there, and its erasure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection, connections

from agentruns import Agent, Image, ModelReply, ModelRequest, Text, ToolContext, run_agent, tool
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, triggers
from agentruns.providers.base import ProviderError
from agentruns.services.runs.forks import fork_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin import pages
from tests.admin.pages import look, read, says
from tests.admin.people import browser, user
from tests.admin.world import TURN, World, ran
from tests.effects import Effects
from tests.pictures import PNG
from tests.registry import isolated_registry
from tests.rows import change
from tests.shop.agents import act, call, post, shop_agent
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db(transaction=True)

VERIFY = Path(__file__).resolve().parents[2] / "docs" / "verify_export.py"
HOSTILE = "<script>alert(1)</script>\u202e"


def url(run: Run, action: str, *args: Any, seq: object = "") -> str:
    return pages.url(run, action, *args) + (f"?seq={seq}" if seq else "")


def seq_of(run: Run, kind: str) -> int:
    return run.messages.filter(kind=kind).earliest("seq").seq


def at(run: Run, seq: object) -> str:
    """Read what the page says of a run at a row."""
    return says(browser("superuser").get(url(run, "at", seq=seq))).text


def test_what_was_sent_is_told_from_what_was_not(world: World) -> None:
    run, client = world.completed(), browser("superuser")
    reply, last = seq_of(run, "assistant"), run.messages.latest("seq").seq
    for seq in range(1, last + 1):
        assert f"Row {seq} of" in at(run, seq)
    says(client.get(url(run, "at")), "completed (was running)")
    beyond = client.get(url(run, "at", seq=99))
    assert (beyond.status_code, beyond.url.endswith(f"seq={last}")) == (302, True)
    at(run, "nonsense")
    shown = at(run, reply)
    assert "What the model was sent for this reply" in shown
    assert "its fingerprint is the one in this row" in shown
    assert "post done" not in shown, "what came after it"
    with triggers.lifted(connection):
        change(run.messages.get(kind="user"), content=[{"type": "text", "text": "forged"}])
    assert "This is not what was sent" in at(run, reply)


@tool(name="pay", sensitive=["token"])
def pay(ctx: ToolContext, token: str, note: str) -> str:
    """Pay."""
    act("pay", ctx)
    return HOSTILE


def test_it_masks_and_escapes_and_so_does_a_fork_under_another_agent() -> None:
    turn = {"text": HOSTILE, "tools": [call("pay", token="tok_42", note=HOSTILE)]}
    run, client = ran("payer", turn, text=HOSTILE, tools=[pay]), browser("superuser")
    other = shop_agent("reader", {"text": "read"}, tools=[])
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="more", agent=other)
    paths = [url(one, "at", seq=row.seq) for one in (run, fork) for row in one.messages.all()]
    call_id = fork.messages.get(kind="tool_started").call_id
    for path in (*paths, url(fork, "change"), url(fork, "call", call_id)):
        html = says(client.get(path)).html
        assert "tok_42" not in html, path
        assert "<script>alert" not in html
        assert "\u202e" not in html
    assert b"tok_42" not in b"".join(client.post(url(fork, "export")))


def test_a_fork_from_the_page(world: World) -> None:
    run, client = world.completed(), browser("superuser")
    form = {"at": seq_of(run, "tool_result"), "key": "k1", "text": "", "agent": ""}
    answer = client.post(url(run, "fork"), form)
    fork = Run.objects.get(origin=run)
    assert (answer.status_code, fork.origin_seq, fork.owner.username) == (302, form["at"], "superuser")
    assert client.post(url(run, "fork"), form).status_code == 302
    assert Run.objects.filter(origin=run).count() == 1, "a double click is one fork"
    assert f"forked at row {form['at']}" in look(run).text
    shown = look(fork).text
    assert "It was forked at row" in shown
    assert "Copied: Tool finished" in shown
    page = look(fork, query="?_changelist_filters=agent%3Dx")
    assert any(f"agent%3Dx&seq={form['at']}" in link for link in page.links), page.links
    assert "This row was copied from" in at(fork, 1)
    Run.objects.filter(pk=fork.pk).update(origin="01a20189-67e9-70a1-9b0c-1b07670a3b0b")
    assert "not in this database any more" in look(fork).text
    shop_agent("boss", {"text": "done"}, starters="directors")
    forks = Permission.objects.filter(codename__in=["fork_run", "start_run"])
    user("viewer").user_permissions.add(*forks)
    assert "boss" not in says(browser("viewer").get(url(run, "at")), "Fork").text, "who may not start it"
    says(client.get(url(run, "at")), "boss")


@tool(safe_to_retry=True)
def peek() -> str:
    """Only look."""
    return "seen"


@tool(transactional=True)
def book(text: str) -> str:
    """Write into the database."""
    return "booked"


@tool(refuses=ValueError)
def refuses(text: str) -> str:
    """Say that nothing happened."""
    raise ValueError(text)


def test_run_again_says_what_was_done_and_wants_a_tick_for_what_cannot_be_taken_back() -> None:
    calls = [
        call("peek"), call("book", text="A1"), call("refuses", text="no"),
        call("pay", token="tok_42", note="<b>gift</b>"), call("post", text="hi"),
    ]  # fmt: skip
    run = ran("doer", {"tools": calls}, tools=[peek, book, refuses, pay, post])
    client, before = browser("superuser"), Message.objects.count()
    assert "again_key" in look(run).html
    page = says(client.post(url(run, "again"), {"key": "k"}), "book: A1", "pay: <b>gift</b>")
    assert "tok_42" not in page.html
    assert not [name for name in ("peek", "refuses") if name in page.text], "these left nothing behind"
    assert page.html.count('type="checkbox" name="knows"') == 2
    ids = {row.tool_name: row.call_id for row in run.messages.filter(kind="tool_started")}
    for ticks in ([], [ids["pay"]], [ids["post"], ids["peek"]]):
        answer = client.post(url(run, "again"), {"key": "k", "asked": "1", "knows": ticks})
        says(answer, "Nothing was started: tick each effect, or go back.", status=400)
    assert Message.objects.count() == before
    ticked = {"asked": "1", "knows": [ids["pay"], ids["post"]]}
    answer = client.post(url(run, "again"), {"key": "k", **ticked})
    again = Run.objects.get(origin=run)
    assert (answer.status_code, answer.url, again.session_id) == (302, url(again, "change"), run.session_id)
    assert client.post(url(run, "again"), {"key": "k", **ticked}).url == url(again, "change")
    assert "It repeats the task of" in look(again).text
    assert client.post(url(again, "again"), {"key": "k2"}).status_code == 409
    assert client.post(url(run, "again"), {"key": "a\u202eb", **ticked}).status_code == 409
    assert client.get(url(run, "again")).status_code == 302
    with isolated_registry():
        assert "is not known in this process" in look(run).text
        assert client.post(url(run, "again"), {"key": "k3", **ticked}).status_code == 409
    assert Run.objects.filter(origin=run).count() == 1


def test_a_fork_wants_a_tick_for_what_was_done_after_the_cut_and_keeps_what_was_typed(world: World) -> None:
    run, client = world.completed(), browser("superuser")
    form = {"at": run.messages.latest("seq").seq, "key": "k", "text": "", "agent": ""}
    says(client.post(url(run, "fork"), form), "nothing left to do", status=409)
    answer = client.post(url(run, "fork"), {**form, "text": "mine", "agent": "x"})
    assert (answer.status_code, "mine" in answer.content.decode()) == (400, True)
    assert client.post(url(run, "fork"), {}).status_code == 400
    assert client.get(url(run, "fork")).status_code == 302
    form |= {"at": seq_of(run, "user"), "text": "mine"}
    page = says(client.post(url(run, "fork"), form), "The run did this after that row.", "post: hi")
    assert Run.objects.count() == 1
    kept = page.forms[url(run, "fork")]
    assert {name: kept[name] for name in form} == {**form, "at": str(form["at"])}, "nothing is typed twice"
    assert client.post(url(run, "fork"), {**form, "asked": "1"}).status_code == 400
    knows = list(run.messages.filter(kind="tool_started").values_list("call_id", flat=True))
    assert client.post(url(run, "fork"), {**form, "knows": knows}).status_code == 302
    after = {**form, "at": seq_of(run, "tool_result"), "key": "k2"}
    assert client.post(url(run, "fork"), after).status_code == 302, "its copy holds the effect"
    assert Run.objects.filter(origin=run).count() == 2


def test_an_export_for_an_auditor(world: World, tmp_path: Path) -> None:
    run, client = world.completed(), browser("viewer")
    answer = client.post(url(run, "export"))
    assert answer["Content-Disposition"] == f'attachment; filename="run-{run.pk}.jsonl"'
    exported = tmp_path / "run.jsonl"
    exported.write_bytes(b"".join(answer))
    verified = subprocess.run([sys.executable, VERIFY, exported], capture_output=True, text=True, check=False)
    assert (verified.returncode, "intact" in verified.stdout) == (0, True)
    assert LogEntry.objects.get().get_change_message() == "Exported for an auditor."
    assert browser("staff").post(url(run, "export")).status_code == 403
    assert client.get(url(run, "export")).status_code == 302


def test_a_doubt_that_a_fork_has_from_its_origin_is_cleared_on_its_page(world: World) -> None:
    run, client = world.orphaned(), browser("superuser")
    fork = fork_run(run.pk, run.messages.latest("seq").seq)
    (call_id,) = run.pending_calls
    says(client.get(url(fork, "call", call_id)))
    seq = fork.messages.filter(call_id=call_id).latest("seq").seq
    verdict = {"verdict": "occurred", "result": "", "evidence": "asked the bank", "seq": seq}
    answer = client.post(url(fork, "resolve", call_id), verdict)
    assert answer.status_code == 302, read(answer).text
    assert fork.messages.filter(kind="orphan_resolved", call_id=call_id).exists()
    assert problems(fork.session_id) == []


class Otherwise:
    """A model that decides otherwise, and says whether a transaction was open when it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.inside: list[bool] = []
        self.error = error

    def propose(self, request: ModelRequest) -> ModelReply:
        self.inside.append(connections["default"].in_atomic_block)
        if self.error is not None:
            raise self.error
        return ModelReply([{"type": "text", "text": HOSTILE}], "end_turn")


def served_by(run: Run, model: Otherwise) -> Otherwise:
    """Let the agent of a run have another model now."""
    shop_agent(run.agent, TURN).model = model
    return model


def replay(run: Run, role: str = "superuser", **sent: str) -> Any:
    return browser(role).post(url(run, "replay"), sent)


def test_a_replay_compares_with_what_is_sent_now(
    world: World, effects: Effects, requests_commit: str
) -> None:
    run = world.completed()
    rows, did = Message.objects.count(), effects.count()
    says(browser("viewer").get(url(run, "replay")), "Compare the recorded run with")
    says(replay(run, "viewer", who="code"), "Every request and every call would be the same.")
    model = served_by(run, Otherwise())
    says(replay(run, who="own"), "The first difference: row 3, $.calls[0]")
    assert model.inside == [False]
    shop_agent(run.agent, instructions=HOSTILE)
    html = replay(run, "viewer", who="code").content.decode()
    assert "The first difference: row 3, $.system" in html
    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert (Message.objects.count(), effects.count()) == (rows, did)
    assert replay(run).status_code == 400
    says(replay(run, who="model"), "Name the model to ask.", status=400)


def test_who_may_ask_a_model_and_that_it_fails_is_told(world: World) -> None:
    run = world.completed()
    model = served_by(run, Otherwise())
    says(replay(run, "operator", who="own"), "replay_run", status=403)
    assert model.inside == []
    user("operator").user_permissions.add(Permission.objects.get(codename="replay_run"))
    assert replay(run, "operator", who="own").status_code == 200
    assert browser("staff").get(url(run, "replay")).status_code == 403
    assert replay(run, "anonymous", who="code").status_code == 302
    for error, said in (
        (ProviderError("the key is wrong"), "the key is wrong"),
        (RuntimeError(HOSTILE), "The model failed: RuntimeError"),
    ):
        served_by(run, Otherwise(error))
        assert "<script>alert" not in says(replay(run, who="own"), said, status=409).html


def refused(text: str = "do it") -> Run:
    """Run an agent that posts, and whose provider then refuses each conversation that holds the result."""

    def propose(request: ModelRequest) -> ModelReply:
        said = str(request.messages)
        if "tool_result" in said and "Left out" not in said:
            raise ProviderError("messages.2 is too odd", disposition="fail", status=400)
        used = {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "x"}}
        words = {"type": "text", "text": "I post it."}
        return ModelReply([words] if "tool_result" in said else [words, used], "end_turn")

    model = ScriptedModel([])
    model.propose = propose  # type: ignore[method-assign]
    agent = Agent("poster", instructions="Post.", model=model, tools=[post])
    return Run.objects.get(pk=run_agent(agent, [Text(text), Image(data=PNG, name="a.png")], "s1").run_id)


def test_what_the_provider_refuses_is_left_out_on_its_page(effects: Effects) -> None:
    run, staff, viewer = refused(), browser("superuser"), browser("viewer")
    seq = seq_of(run, "tool_result")
    link, leave = url(run, "at", seq=seq), url(run, "leave_out", seq)
    shown = says(staff.get(url(run, "change")), "messages.2 is too odd", "Its provider refuses")
    assert (beside := f"{link}&leave=1#row-{seq}") in shown.links, "beside the result"
    assert leave in says(staff.get(link), "Leave this out and go on").forms
    task = says(staff.get(url(run, "at", seq=seq_of(run, "user"))), "all of it", "a.png").html
    assert '<option value="1">a.png</option>' in task
    for page in (url(run, "change"), link):
        assert "leave" not in str([*says(viewer.get(page)).forms, *says(viewer.get(page)).links])
    assert viewer.post(leave).status_code == 403
    assert (staff.get(leave).status_code, run.messages.filter(kind="left_out").count()) == (302, 1)
    says(staff.post(leave, {"block": "x", "reason": "typed"}), "Nothing was left out", "typed", status=400)
    assert staff.post(leave, {"block": "7"}).status_code == 409
    assert staff.post(leave, {"reason": "The filter minds it."}).status_code == 302
    row = run.messages.filter(kind="left_out").latest("seq")
    assert (row.payload["seq"], row.payload["reason"]) == (seq, "The filter minds it.")
    says(staff.get(url(run, "change")), "Left out of later requests")
    assert LogEntry.objects.filter(change_message__contains=f"Left out row {seq}").exists()
    assert (sweep().found, effects.count()) == (1, 1)
    run.refresh_from_db()
    assert (run.status, problems(run.session_id)) == ("completed", [])
    assert beside not in says(staff.get(url(run, "change"))).links


def test_a_row_is_erased_by_who_may_with_a_reason() -> None:
    run, staff, viewer = ran("one", text="SECRET-TASK"), browser("superuser"), browser("viewer")
    erase = url(run, "erase", 2)
    assert erase in staff.get(url(run, "at", seq=2)).content.decode()
    with captured_statements() as statements:
        shown = staff.get(erase).content.decode()
    assert {sql.split()[0] for sql in statements} == {"SELECT"}, "looking locks nothing"
    assert f"Row 2 (user) of run {run.pk}" in shown and "backups" in shown
    assert run.messages.get(seq=2).content is not None, "looking changes nothing"
    assert staff.post(erase, {"reason": ""}).status_code == 400
    assert erase not in viewer.get(url(run, "at", seq=2)).content.decode()
    assert viewer.post(erase, {"reason": "x"}).status_code == 403
    assert staff.post(erase, {"reason": "a letter"}).status_code == 302
    row = run.messages.get(kind="payload_erased")
    assert (run.messages.get(seq=2).content, row.payload["reason"]) == (None, "a letter")
    assert "SECRET-TASK" not in look(run).html
    assert staff.get(url(run, "erase", 99)).status_code == 409
