"""The demo with the real SDKs over HTTP, and every fault of the provider at every request."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.e2e import claude
from tests.e2e.demo_project import EFFECTS, STATUSES, Project
from tests.e2e.faulty import FAULTS, HARMLESS, is_fatal, met
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI, chat
from tests.programs import run_program

REFUND, VOUCHER, EMAIL = "refund", "voucher", "email"
DOES = {
    1: [EMAIL],
    2: [REFUND, EMAIL],
    3: [REFUND, EMAIL],
    4: [REFUND, EMAIL],
    5: [EMAIL],
    7: [VOUCHER, EMAIL],
}


def test_the_demo_works_with_the_real_sdk(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with FakeAnthropic(claude.script) as fake:
        fake.fault(529, at=2, retry_after=1)  # the first ticket's second request
        demo = project.run("demo", **fake.environment(), MODEL=claude.MODEL)
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert {call.status for call in fake.calls} == {200, 529}
    assert [(line["session"], line["kind"]) for line in project.ledger()] == EFFECTS
    assert {session: run["status"] for session, run in project.runs().items()} == STATUSES
    (rows,) = project.journals("ticket-1")
    failed = [row["payload"]["error"]["type"] for row in rows if row["kind"] == "model_failed"]
    assert failed == ["overloaded_error"]
    replies = [row["payload"] for row in rows if row["kind"] == "assistant"]
    assert {reply["model"] for reply in replies} == {claude.MODEL}
    assert replies[-1]["usage"]["cache_read_input_tokens"] > 0


def test_every_fault_at_every_request_leaves_the_ledger_exact(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.run("migrate", "-v0")
    project.run("loaddata", "helpdesk", "-v0")
    done = run_program(sys.executable, "-m", "tests.e2e.faulty", env=project.environment())
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    requests = {ticket: range(len(claude.transcript(ticket)["turns"])) for ticket in DOES}
    met_by = [(line["ticket"], *each) for line in lines for each in enumerate(line["plan"]) if each[1]]
    assert sorted(met_by) == sorted(
        (ticket, position, name) for ticket in DOES for position in requests[ticket] for name in FAULTS
    )
    for line in lines:
        kinds, plan = [kind for kind, _ in line["effects"]], tuple(line["plan"])
        assert line["met"] == met(plan), line
        assert line["failed"] == sum(kind not in ("", HARMLESS) for kind in line["met"]), line
        assert line["status"] == ("failed" if is_fatal(plan) else "completed"), line
        assert line["problems"] == [], line
        assert len({key for _, key in line["effects"]}) == len(kinds), line
        expected = DOES[line["ticket"]]
        assert kinds == (expected[: len(kinds)] if is_fatal(plan) else expected), line


# A model of another provider, at a server that one variable names

LOCAL = "llama3.3"


def as_chat(body: Any) -> dict[str, Any]:
    """Find the next turn of the ticket that the conversation begins with."""
    told = claude.transcript_of(body["messages"][1], body["tools"])
    turns = list(told["turns"])
    for number, message in enumerate(body["messages"]):
        for sign, path in claude.SIDE_PATHS.items():
            if path in told and message["role"] == "tool" and sign in json.dumps(message):
                turns = [*turns[: chat.replies({"messages": body["messages"][:number]})], *told[path]]
    return dict(turns[chat.replies(body)])


def test_the_demo_works_with_a_local_server_and_one_variable(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with FakeOpenAI(as_chat, api_key="none", models=[LOCAL]) as fake:
        demo = project.run("demo", MODEL=f"openai:{LOCAL}", OPENAI_BASE_URL=fake.url)
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert {(call.path, call.status) for call in fake.calls} == {("/v1/chat/completions", 200)}
    assert f"openai:{LOCAL}" in demo.stdout
    assert [(line["session"], line["kind"]) for line in project.ledger()] == EFFECTS
    assert {session: run["status"] for session, run in project.runs().items()} == STATUSES
    (rows,) = project.journals("ticket-1")
    replies = [row["payload"] for row in rows if row["kind"] == "assistant"]
    assert {reply["model"] for reply in replies} == {f"openai:{LOCAL}"}
