from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from pydantic import BaseModel

from agentruns import Agent, cancel_run, pause_run, start_run
from agentruns.engine.leases import claim
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.testing import ScriptedModel, crashing_at, expire_leases
from tests.commands.running import Outcome, run
from tests.effects import Effects
from tests.pictures import PDF, PNG, files_of
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_prints_the_journal_and_the_answer_once(effects: Effects) -> None:
    shop_agent("cli", {"tools": [call("post", text="hi")]})
    command = ("run_agent", "cli", "say hi", "--session=s1", "--idempotency-key=k1")
    first, second = run(*command), run(*command)
    assert (first.code, second.code, effects.count()) == (0, 0, 1)
    journal, _, end = first.out.partition("\n\n")
    assert [line.split()[3] for line in journal.splitlines()] == [
        "run_started", "user", "assistant", "tool_started", "tool_result", "assistant", "run_completed",
    ]  # fmt: skip
    assert end == f"Run {Run.objects.get().pk} in session s1 is completed.\nall done\n"
    assert second.out == f"\n{end}"


def test_json_lines_and_an_output_that_is_a_value() -> None:
    class Answer(BaseModel):
        total: int

    model, user = ScriptedModel([{"text": '{ "total": 5 }'}]), User.objects.create_user("ann")
    Agent("cli", instructions="Add up.", model=model, output_type=Answer)
    for more in ((), ("--user=ann",)):
        assert run("run_agent", "cli", "add", *more).out.splitlines()[-1] == '{"total":5}'
    owners = Run.objects.values_list("owner_id", flat=True)
    assert {*owners} == {None, user.pk}, "without a session it makes one"
    *rows, end = run("run_agent", "cli", "add", "--session=s1", "--json").lines
    assert [row["seq"] for row in rows] == list(range(1, 5))
    assert end == {
        "run": str(Run.objects.get(session__key="s1").pk), "session": "s1", "status": "completed",
        "output": '{"total":5}', "error": "",
    }  # fmt: skip


def test_it_says_where_to_decide_and_names_the_call_once(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop_agent("cli", {"tools": [call("refund", cents=5000)]})
    outcome = run("run_agent", "cli", "do it", "--session=s1")
    approval = Approval.objects.get()
    assert outcome.out.splitlines()[-1] == (
        f"Decide in the admin under Approvals, or: manage.py approve_call {approval.pk} --user NAME; "
        "then manage.py resume_runs."
    )
    (asked,) = [line for line in outcome.out.splitlines() if "approval_requested" in line]
    assert asked.split("approval_requested")[1].startswith("  refund(cents=5000) (risk high")
    monkeypatch.delattr(django_settings, "ROOT_URLCONF")
    said = run("run_agent", "cli", "do it", "--session=s1").out.splitlines()[-1]
    assert said.startswith("Decide: manage.py approve_call "), "without an admin it names commands alone"


def test_after_a_crash_it_says_what_it_told_the_model() -> None:
    shop_agent("cli", {"tools": [call("post", text="hi")]})
    command = ("run_agent", "cli", "do it", "--session=s1", "--idempotency-key=k1")
    with crashing_at("after_tool"):
        run(*command)
    expire_leases()
    again = run(*command)
    (doubt,) = Message.objects.filter(kind="orphan_found")
    assert again.code == 0
    assert again.out.partition("is completed.\n")[2].splitlines()[:2] == [
        "The outcome of 1 call is unknown, and the model is told so. Say what became of it:",
        f"/admin/agentruns/run/{doubt.run_id}/calls/{doubt.call_id}/",
    ]
    assert "is unknown" not in run(*command).out  # it was said


class TestExitCodes:
    @pytest.fixture(autouse=True)
    def _agent(self) -> None:
        shop_agent("cli", {"tools": [call("refund", cents=5000)]})

    def command(self) -> Outcome:
        return run("run_agent", "cli", "do it", "--session=s1", "--idempotency-key=k1")

    def test_failed_in_back_off_live_elsewhere_and_unknown(self) -> None:
        def busy(request: object) -> object:
            raise ProviderError("busy", disposition="retry", retry_after=60)

        shop_agent("too-long", *[{"tools": [call("lookup", number="1")]}] * 3, max_steps=2, on_budget="fail")
        shop_agent("busy", busy)
        assert run("run_agent", "too-long", "do it", "--session=s2").code == 1
        assert run("run_agent", "busy", "do it", "--session=s3").code == 4
        queued = start_run("cli", "do it", "s1", idempotency_key="k1")
        assert claim("default", queued.pk) is not None
        outcome = self.command()
        assert (outcome.code, "is live in another process" in outcome.err) == (4, True)
        outcome = run("run_agent", "nobody\x1b[2J", "do it")
        assert (outcome.code, "There is no agent" in outcome.err, "\x1b" in outcome.err) == (1, True, False)

    def test_waiting_for_a_person(self) -> None:
        outcome = self.command()
        assert outcome.code == 3
        assert "Waits for a person: refund(cents=5000)" in outcome.out
        other = run("run_agent", "cli", "something else", "--session=s1")
        assert (other.code, "another agent, input or context" in other.err) == (4, True)

    def test_paused(self) -> None:
        self.command()
        paused = pause_run(Run.objects.get().pk, None, reason="the bank is shut")
        outcome = self.command()
        assert outcome.code == 3
        path = f"/admin/agentruns/run/{paused.pk}/change/"
        assert outcome.out.endswith(f"Held: the bank is shut. Put that right, then press Resume on {path}\n")
        cancel_run(paused.pk)
        assert self.command().code == 5

    @pytest.mark.parametrize("arguments", [("cli", " "), ("cli", "do it", "--user=nobody")])
    def test_usage(self, arguments: tuple[str, ...]) -> None:
        assert run("run_agent", *arguments).code == 2
        assert not Run.objects.exists()


def test_a_task_with_files(tmp_path: Path) -> None:
    shop_agent("sees", {"text": "I see."})
    photo, paper = tmp_path / "mug.png", tmp_path / "bill.pdf"
    photo.write_bytes(PNG)
    paper.write_bytes(PDF)
    done = run("run_agent", "sees", "look", "--session", "s1", "--file", str(photo), "--file", str(paper))
    assert done.code == 0
    assert "[image mug.png: image/png" in done.out
    row = Message.objects.get(kind="user")
    assert [each["name"] for each in files_of(row)] == ["mug.png", "bill.pdf"]
    for path in (tmp_path / "none.png", tmp_path):
        assert run("run_agent", "sees", "look", "--file", str(path)).code == 2
    photo.write_bytes(b"\x00\xff")
    refused = run("run_agent", "sees", "look", "--file", str(photo))
    assert (refused.code, "of no known type" in refused.err) == (2, True)
    assert Run.objects.count() == 1
