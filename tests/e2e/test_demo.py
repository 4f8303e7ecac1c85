"""The main job, end to end: real processes, real SIGKILLs, and a ledger outside the database."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo_project import EFFECTS, STATUSES, Project

# Ticket 6 alone, handed to its agent, whose run waits for its child.
BEGUN = """
from django.core.management import call_command

from agentruns import deliver_event, run_agent
from agentruns.services.sweep import sweep
from project.helpdesk import ledger
from project.helpdesk.models import Ticket

call_command("migrate", verbosity=0)
call_command("loaddata", "helpdesk", verbosity=0)
Ticket.objects.exclude(number=6).delete()
ticket = Ticket.objects.get()
run_agent("returns", ticket.as_task(), ticket.session_key, idempotency_key=ticket.idempotency_key)
"""
WAITS = "sweep(); sweep()\n"
EXHAUSTED = WAITS + "deliver_event('parcel', ledger.lines()[0]['label'], 'it is here'); sweep()\n"
CARD = 'card = run("ticket-4").approvals.get(); '
APPROVED = CARD + 'agentruns.approve(card.pk, user, digest=card.digest, reason="be generous")\n'
DENIED = CARD + 'agentruns.deny(card.pk, user, "repair it", digest=card.digest)\n'
VERDICT = 'held = run("ticket-5"); agentruns.resolve_orphan(held.pk, held.pending_calls[0], "{}", user)\n'
Ended = tuple[Project, subprocess.CompletedProcess[str]]


def of_tool(rows: list[dict[str, Any]], tool: str) -> dict[str, dict[str, Any]]:
    return {row["kind"]: row for row in rows if row["tool_name"] == tool}


def effects(project: Project) -> list[tuple[str, str]]:
    return [(line["session"], line["kind"]) for line in project.ledger()]


def test_every_effect_happened_once_and_it_says_how_to_go_on(ended: Ended) -> None:
    project, demo = ended
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    for text in (
        "kill -9", "writes again", "child photos", "No process is left", "raises the budget", "make console",
        "http://127.0.0.1:8000/admin/", "user demo, password demo",
    ):  # fmt: skip
        assert text in demo.stdout
    assert effects(project) == EFFECTS
    assert set(Counter(line["key"] for line in project.ledger()).values()) == {1}
    assert {session: run["status"] for session, run in project.runs().items()} == STATUSES


def test_what_the_journals_say(ended: Ended) -> None:
    sessions = ("ticket-2", "ticket-3", "ticket-4", "ticket-5", "ticket-6")
    found, approved, waits, held, returned = ended[0].journals(*sessions)

    # The broken mug is seen, and the refund was found by its key.
    task = next(row["payload"] for row in found if row["kind"] == "user")
    (photo,) = [block for block in task["content"] if block["type"] == "image"]
    assert (photo["media_type"], photo["name"]) == ("image/png", "ticket-2.png")
    refund, mail = [line for line in ended[0].ledger() if line["session"] == "ticket-2"]
    rows = of_tool(found, "refund")
    assert list(rows) == ["tool_started", "orphan_found", "orphan_resolved", "tool_result"]
    assert rows["tool_started"]["payload"]["key"] == refund["key"]
    assert rows["orphan_resolved"]["payload"]["verdict"] == "occurred"
    assert rows["tool_result"]["epoch"] > rows["tool_started"]["epoch"]
    assert refund["pid"] != mail["pid"], "a second process ended the ticket"

    # The approval names who and what.
    rows = of_tool(approved, "refund")
    assert list(rows) == ["approval_requested", "approval_decided", "tool_started", "tool_result"]
    assert rows["approval_decided"]["payload"]["actor"]["name"] == "demo"
    assert rows["approval_decided"]["payload"]["digest"] == rows["approval_requested"]["payload"]["digest"]

    # The customer writes again while the refund waits.
    assert [row["kind"] for row in waits][-2:] == ["approval_requested", "user"]
    assert waits[-1]["payload"]["reason"] == "message"

    # The mail waits for a person.
    rows = of_tool(held, "email_customer")
    assert list(rows) == ["tool_started", "orphan_found"]
    assert rows["orphan_found"]["payload"]["action"] == "held"

    # The photo goes to a child, the parcel comes once, and the budget is raised once; no process does it all.
    kinds = Counter(row["kind"] for row in returned)
    once = ("event_delivered", "run_paused", "budget_raised", "run_completed")
    assert {kinds[kind] for kind in once} == {1}
    child, parcel = [row["payload"] for row in returned if row["kind"] == "event_awaited"]
    answer = of_tool(returned, "photos")["tool_result"]["payload"]["content"]
    assert (child["name"], parcel["name"], "steel" in answer) == ("agentruns.child", "parcel", True)
    label, refund, mail = [line for line in ended[0].ledger() if line["session"] == "ticket-6"]
    assert (label["label"], len({label["pid"], refund["pid"], mail["pid"]})) == (parcel["key"], 3)


def test_again_doubles_nothing(project: Project) -> None:
    ledger = project.ledger()
    again = project.run("demo")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("was done already") == 4
    assert again.stdout.count("waits for you: run") == 2
    assert project.ledger() == ledger
    assert {session: run["status"] for session, run in project.runs().items()} == STATUSES


@pytest.mark.parametrize("stopped", [WAITS, EXHAUSTED])
def test_again_goes_on_where_a_demo_was_stopped(tmp_path: Path, stopped: str) -> None:
    project = Project(tmp_path)
    begun = project.run("shell", "-v0", "-c", BEGUN + stopped)
    assert begun.returncode == 0, begun.stderr
    again = project.run("demo")
    assert (again.returncode, again.stdout.count("goes on")) == (0, 1), again.stdout + again.stderr
    assert effects(project) == EFFECTS[-3:]
    assert project.runs()["ticket-6"]["status"] == "completed"
    kinds = Counter(row["kind"] for row in project.journals("ticket-6")[0])
    assert (kinds["event_awaited"], kinds["event_delivered"], kinds["budget_raised"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("decisions", "more", "says"),
    [
        (
            APPROVED + VERDICT.format("not_occurred"),
            {("ticket-4", "refund"), ("ticket-4", "email"), ("ticket-5", "email")},
            "2 times, as a person ordered",
        ),
        (DENIED + VERDICT.format("unknown"), {("ticket-4", "email")}, "Every effect happened once"),
    ],
)
def test_again_after_decisions_goes_on_from_them(
    project: Project, decisions: str, more: set[tuple[str, str]], says: str
) -> None:
    project.python(decisions)
    again = project.run("demo")
    assert again.returncode == 0, again.stdout + again.stderr
    assert says in again.stdout
    done = effects(project)
    assert (done[: len(EFFECTS)], sorted(done[len(EFFECTS) :])) == (EFFECTS, sorted(more))
    assert project.runs()["ticket-5"]["status"] == "completed"


def test_a_doubled_a_missing_effect_and_an_unreadable_ledger_are_exit_1(project: Project) -> None:
    ledger = project.folder / "effects.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    mail, refund = lines[-len(EFFECTS)], lines[-len(EFFECTS) + 1]
    key = project.ledger()[1]["key"]
    ledger.write_text("".join([*(line for line in lines if line != mail), refund]))
    again = project.run("demo")
    assert again.returncode == 1
    assert f"The refund of ticket-2 with key {key[:12]} happened 2 times." in again.stderr
    assert "email_customer of ticket-1 succeeded" in again.stderr
    ledger.write_text("".join([*lines, "{not json\n"]))
    again = project.run("demo")
    assert (again.returncode, f"Line {len(lines) + 1} of" in again.stderr) == (1, True)
