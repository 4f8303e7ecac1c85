"""A run at any row: what it was, what the model was sent, and a fork from there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection
from django.urls import reverse

from agentruns import ToolContext, run_agent, tool
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, triggers
from agentruns.services.forks import fork_run
from tests.admin.pages import read
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.registry import isolated_registry
from tests.rows import change
from tests.shop.agents import act, call, post, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

VERIFY = Path(__file__).resolve().parents[2] / "docs" / "verify_export.py"
HOSTILE = "<script>alert(1)</script>\u202e"


def url(run: Run, action: str = "at", **query: Any) -> str:
    path = reverse(f"admin:agentruns_run_{action}", args=[run.pk])
    return path + "?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else path


def seq_of(run: Run, kind: str) -> int:
    return Message.objects.filter(run=run, kind=kind).order_by("seq").first().seq


def test_every_row_has_its_moment(world: World) -> None:
    run = world.completed()
    for message in Message.objects.filter(run=run).order_by("seq"):
        response = browser("superuser").get(url(run, seq=message.seq))
        assert response.status_code == 200
        assert f"Row {message.seq} of" in read(response).text
    shown = read(browser("superuser").get(url(run)))
    assert "completed (was running)" in shown.text
    first = browser("superuser").get(url(run, seq=99))
    assert first.status_code == 302
    assert first.url.endswith(f"seq={run.messages.latest('seq').seq}")
    assert browser("superuser").get(url(run, seq="nonsense")).status_code == 200


def test_what_was_sent_is_told_from_what_was_not(world: World) -> None:
    run = world.completed()
    reply = seq_of(run, "assistant")
    shown = read(browser("superuser").get(url(run, seq=reply))).text
    assert "What the model was sent for this reply" in shown
    assert "its fingerprint is the one in this row" in shown
    assert "post done" not in shown, "what came after it"
    with triggers.lifted(connection):
        row = Message.objects.get(run=run, kind="user")
        change(row, content=[{"type": "text", "text": "forged"}])
    assert "This is not what was sent" in read(browser("superuser").get(url(run, seq=reply))).text


@tool(name="pay", sensitive=["token"])
def pay(ctx: ToolContext, token: str, note: str) -> str:
    """Pay."""
    act("pay", ctx)
    return HOSTILE


def test_it_masks_and_escapes(world: World) -> None:
    agent = shop_agent(
        "payer", {"text": HOSTILE, "tools": [call("pay", token="tok_42", note=HOSTILE)]}, tools=[pay]
    )
    run = Run.objects.get(pk=run_agent(agent, HOSTILE, "pay-1").run_id)
    for message in Message.objects.filter(run=run):
        response = browser("superuser").get(url(run, seq=message.seq))
        html = response.content.decode()
        assert "tok_42" not in html
        assert "<script>alert" not in html
        assert "\u202e" not in html


def test_a_fork_from_the_page(world: World) -> None:
    run = world.completed()
    client = browser("superuser")
    form = {"at": seq_of(run, "tool_result"), "key": "k1", "text": "", "agent": ""}
    answer = client.post(url(run, "fork"), form)
    fork = Run.objects.get(origin=run)
    assert (answer.status_code, fork.origin_seq, fork.owner.username) == (302, form["at"], "superuser")
    assert client.post(url(run, "fork"), form).status_code == 302
    assert Run.objects.filter(origin=run).count() == 1, "a double click is one fork"
    shown = read(client.get(url(run, "change"))).text
    assert f"forked at row {form['at']}" in shown
    assert "It was forked at row" in read(client.get(url(fork, "change"))).text
    page = read(client.get(url(fork, "change", _changelist_filters="agent%3Dx")))
    assert any(f"agent%3Dx&seq={form['at']}" in link for link in page.links), page.links
    journal = read(client.get(url(fork, "change"))).text
    assert "Copied: Tool finished" in journal
    copied = read(client.get(url(fork, seq=1))).text
    assert "This row was copied from" in copied


def test_a_fork_is_offered_only_agents_that_one_may_start(world: World) -> None:
    run = world.completed()
    shop_agent("boss", {"text": "done"}, starters="directors")
    forks = Permission.objects.filter(codename__in=["fork_run", "start_run"])
    user("viewer").user_permissions.add(*forks)
    page = read(browser("viewer").get(url(run, "at")))
    assert "Fork" in page.text
    assert "boss" not in page.text
    assert "boss" in read(browser("superuser").get(url(run, "at"))).text


def test_a_fork_that_is_refused_says_why_and_keeps_what_was_typed(world: World) -> None:
    run = world.completed()
    last = run.messages.latest("seq").seq
    answer = browser("superuser").post(url(run, "fork"), {"at": last, "key": "k", "text": "", "agent": ""})
    assert answer.status_code == 409
    assert "nothing left to do" in read(answer).text
    answer = browser("superuser").post(
        url(run, "fork"), {"at": last, "key": "k", "text": "mine", "agent": "x"}
    )
    assert answer.status_code == 400
    assert "mine" in answer.content.decode()
    assert browser("superuser").post(url(run, "fork"), {}).status_code == 400
    assert browser("superuser").get(url(run, "fork")).status_code == 302
    assert Run.objects.count() == 1


@pytest.mark.parametrize(("action", "made"), [("fork", {"at": 1, "text": "x"}), ("again", {})])
@pytest.mark.parametrize(
    ("who", "status"),
    [
        ("superuser", 302),
        ("viewer", 403),
        ("operator", 403),
        ("staff", 403),
        ("anonymous", 302),
        ("outsider", 302),
    ],
)
def test_who_may(world: World, action: str, made: dict[str, Any], who: str, status: int) -> None:
    run = world.completed()
    answer = browser(who).post(url(run, action), {"key": "k", **made, **knowing(run)})
    assert answer.status_code == status
    assert Run.objects.filter(origin=run).count() == (1 if who == "superuser" else 0)


def knowing(run: Run) -> dict[str, list[str]]:
    """Return the ticks at everything that a run did."""
    return {"knows": list(run.messages.filter(kind="tool_started").values_list("call_id", flat=True))}


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


def test_run_again_says_what_was_done_and_wants_a_tick_for_what_cannot_be_taken_back(world: World) -> None:
    calls = [
        call("peek"), call("book", text="A1"), call("refuses", text="no"),
        call("pay", token="tok_42", note="<b>gift</b>"), call("post", text="hi"),
    ]  # fmt: skip
    agent = shop_agent("doer", {"tools": calls}, tools=[peek, book, refuses, pay, post])
    run = Run.objects.get(pk=run_agent(agent, "do", "doer-1").run_id)
    client, before = browser("superuser"), Message.objects.count()
    answer = client.post(url(run, "again"), {"key": "k"})
    page, html = read(answer), answer.content.decode()
    assert (answer.status_code, Message.objects.count()) == (200, before)
    assert "book: A1" in page.text
    assert "pay: <b>gift</b>" in page.text
    assert "tok_42" not in html
    assert not [name for name in ("peek", "refuses") if name in page.text], "these left nothing behind"
    assert html.count('type="checkbox" name="knows"') == 2
    ids = {row.tool_name: row.call_id for row in run.messages.filter(kind="tool_started")}
    for ticks in ([], [ids["pay"]], [ids["post"], ids["peek"]]):
        answer = client.post(url(run, "again"), {"key": "k", "asked": "1", "knows": ticks})
        assert answer.status_code == 400
        assert "Nothing was started: tick each effect, or go back." in read(answer).text
        assert Message.objects.count() == before
    answer = client.post(url(run, "again"), {"key": "k", "asked": "1", "knows": [ids["pay"], ids["post"]]})
    assert (answer.status_code, Run.objects.filter(origin=run).count()) == (302, 1)


def test_a_fork_wants_a_tick_for_what_was_done_after_the_cut(world: World) -> None:
    run, client = world.completed(), browser("superuser")
    form = {"at": seq_of(run, "user"), "key": "k", "text": "mine", "agent": ""}
    answer = client.post(url(run, "fork"), form)
    page = read(answer)
    assert (answer.status_code, Run.objects.count()) == (200, 1)
    assert "The run did this after that row." in page.text
    assert "post: hi" in page.text
    kept = page.forms[url(run, "fork")]
    assert {name: kept[name] for name in form} == {**form, "at": str(form["at"])}, "nothing is typed twice"
    assert client.post(url(run, "fork"), {**form, "asked": "1"}).status_code == 400
    assert client.post(url(run, "fork"), {**form, **knowing(run)}).status_code == 302
    after = {**form, "at": seq_of(run, "tool_result"), "key": "k2"}
    assert client.post(url(run, "fork"), after).status_code == 302, "its copy holds the effect"
    assert Run.objects.filter(origin=run).count() == 2


def test_again(world: World) -> None:
    run = world.completed()
    client = browser("superuser")
    assert "again_key" in client.get(url(run, "change")).content.decode()
    answer = client.post(url(run, "again"), {"key": "k", **knowing(run)})
    again = Run.objects.get(origin=run)
    assert (answer.status_code, answer.url, again.session_id) == (302, url(again, "change"), run.session_id)
    assert client.post(url(run, "again"), {"key": "k", **knowing(run)}).url == url(again, "change")
    shown = read(client.get(url(again, "change")))
    assert "It repeats the task of" in shown.text
    assert client.post(url(again, "again"), {"key": "k2"}).status_code == 409
    assert client.post(url(run, "again"), {"key": "a\u202eb", **knowing(run)}).status_code == 409
    assert client.get(url(run, "again")).status_code == 302
    with isolated_registry():
        assert "is not known in this process" in read(client.get(url(run, "change"))).text
        assert client.post(url(run, "again"), {"key": "k3", **knowing(run)}).status_code == 409
    assert Run.objects.filter(origin=run).count() == 1


def test_the_moment_of_a_fork_whose_origin_is_gone(world: World) -> None:
    run = world.completed()
    fork = fork_run(run.pk, seq_of(run, "tool_result"))
    Run.objects.filter(pk=fork.pk).update(origin="01a20189-67e9-70a1-9b0c-1b07670a3b0b")
    assert "not in this database any more" in read(browser("superuser").get(url(fork, "change"))).text


def test_an_export_for_an_auditor(world: World, tmp_path: Path) -> None:
    run = world.completed()
    client = browser("viewer")
    answer = client.post(url(run, "export"))
    assert answer["Content-Disposition"] == f'attachment; filename="run-{run.pk}.jsonl"'
    exported = tmp_path / "run.jsonl"
    exported.write_bytes(b"".join(answer))
    verified = subprocess.run([sys.executable, VERIFY, exported], capture_output=True, text=True, check=False)
    assert (verified.returncode, "intact" in verified.stdout) == (0, True)
    assert LogEntry.objects.get().get_change_message() == "Exported for an auditor."
    assert browser("staff").post(url(run, "export")).status_code == 403
    assert client.get(url(run, "export")).status_code == 302


def test_what_the_origins_agent_calls_sensitive_stays_so_under_another_agent(world: World) -> None:
    turn = {"tools": [call("pay", token="tok_42", note="n")]}
    run = Run.objects.get(pk=run_agent(shop_agent("payer", turn, tools=[pay]), "pay", "pay-1").run_id)
    other = shop_agent("reader", {"text": "read"}, tools=[])
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="more", agent=other)
    client = browser("superuser")
    pages = [url(fork, "change"), *(url(fork, seq=row.seq) for row in Message.objects.filter(run=fork))]
    started = Message.objects.get(run=fork, kind="tool_started").call_id
    pages.append(reverse("admin:agentruns_run_call", args=[fork.pk, started]))
    for page in pages:
        answer = client.get(page)
        assert (answer.status_code, b"tok_42" in answer.content) == (200, False), page
    assert b"tok_42" not in b"".join(client.post(url(fork, "export")))


def test_a_doubt_that_a_fork_has_from_its_origin_is_cleared_on_its_page(world: World) -> None:
    run = world.orphaned()
    fork = fork_run(run.pk, run.messages.latest("seq").seq)
    (call_id,) = run.pending_calls
    page = reverse("admin:agentruns_run_call", args=[fork.pk, call_id])
    client = browser("superuser")
    assert client.get(page).status_code == 200
    seq = fork.messages.filter(call_id=call_id).latest("seq").seq
    verdict = {"verdict": "occurred", "result": "", "evidence": "asked the bank", "seq": seq}
    answer = client.post(f"{page}resolve/", verdict)
    assert answer.status_code == 302, read(answer).text
    assert Message.objects.filter(run=fork, kind="orphan_resolved", call_id=call_id).exists()
    assert problems(fork.session_id) == []
