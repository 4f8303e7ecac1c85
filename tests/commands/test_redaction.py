"""No command prints and no log holds what AGENTRUNS_REDACT takes out, nor a sensitive argument."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from agentruns import Agent, approve
from agentruns.models import Message, Run
from agentruns.testing import ScriptedModel
from agentruns.utils.redaction import FAILED
from tests.commands.running import run
from tests.redacting import CARD, FAIL, HIDE, KEY, PIN, Story, explode, leaks, story
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def case(settings: Any, caplog: pytest.LogCaptureFixture) -> Story:
    settings.AGENTRUNS_REDACT = HIDE
    caplog.set_level(logging.DEBUG)
    return story()


def commands(case: Story) -> list[tuple[str, ...]]:
    """Return every command that prints something of the story, each also as JSON."""
    waits = ("--session", f"waits {CARD}")
    plain: list[tuple[str, ...]] = [
        ("list_runs",),
        ("list_runs", "--status", "failed"),
        ("resume_runs", "--dry-run"),
        ("verify_journal",),
        ("verify_journal", "--session", f"talk {CARD}"),
        ("run_agent", "keeper", f"again {CARD}", *waits, "--idempotency-key", f"thrice {KEY}"),
        ("run_agent", "keeper", f"other {CARD}", *waits),
        ("run_agent", "keeper", f"new {CARD}", "--session", f"new {CARD}"),
        ("run_agent", "refused", f"bad {CARD}", "--session", f"bad {CARD}"),
        ("run_agent", "keeper", "hi", "--user", KEY),
        *[("show_run", str(one.pk)) for one in case.runs],
        ("show_run", KEY),
        ("verify_journal", "--session", KEY),
    ]  # fmt: skip
    return [command + more for command in plain for more in ((), ("--json",))]


def test_no_command_prints_a_secret(case: Story) -> None:
    for command in commands(case):
        outcome = run(*command)
        assert outcome.out or outcome.err, command
        assert leaks(outcome.out) == [], command
        assert leaks(outcome.err) == [], command
        assert PIN not in outcome.out, command
    shown = run("show_run", str(case.done.pk)).out
    for text in ("talk [card]", "done with [card]", "no access with [key]", "[key] leaked", 'pin="***"'):
        assert text in shown
    failed = run("show_run", str(case.failed.pk)).out
    assert "[key] is not valid for [card]" in failed


def test_what_json_names_is_true_and_what_it_says_is_redacted(case: Story) -> None:
    shown = run("show_run", str(case.done.pk), "--json").lines[0]
    rows = list(Message.objects.filter(run=case.done).order_by("seq"))
    assert (shown["id"], shown["definition"]) == (str(case.done.pk), case.done.definition_id)
    assert [row["hash"] for row in shown["messages"]] == [row.hash for row in rows]
    assert (shown["session"], shown["output"]) == ("talk [card]", "done with [card]\nand [key]")
    replies = [row for row in shown["messages"] if row["kind"] == "assistant"]
    asked = next(row for row in replies if row["payload"]["calls"][0]["tool"] == "charge")
    assert asked["payload"]["calls"][0]["arguments"]["pin"] == "***"
    assert asked["payload"]["content"][1]["input"]["pin"] == "***"


def test_sensitive_arguments_are_masked_without_the_setting_too(case: Story, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = None
    for command in commands(case):
        assert PIN not in run(*command).out, command
    assert f"talk {CARD}" in run("show_run", str(case.done.pk)).out


def test_a_repair_prints_no_secret(case: Story) -> None:
    # Said with at most 100 characters: half of the card would be left of it.
    Run.objects.filter(pk=case.done.pk).update(output=f"{'x' * 88} {CARD}", error=KEY)
    told_of = {"": "is 'xx", "--json": "is 'xx", "--repair": "rewritten from 'xx"}
    for option, words in told_of.items():
        command = ["verify_journal", *([option] if option else [])]
        outcome = run(*command)
        assert f"output {words}" in outcome.out, outcome.out
        assert leaks(outcome.out) == [], command
    assert Run.objects.get(pk=case.done.pk).output == f"done with {CARD}\nand {KEY}"


def test_no_log_holds_a_secret(case: Story, caplog: pytest.LogCaptureFixture) -> None:
    approve(case.waiting.pk, None)
    run("resume_runs")
    assert "Tool failed" in caplog.text
    assert "ValueError: no access with [key]" in caplog.text
    assert leaks(caplog.text) == []
    assert all(record.exc_info is None for record in caplog.records if record.name.startswith("agentruns"))


def breaks(request: Any) -> Any:
    raise RuntimeError(f"unexpected {KEY}")


def test_an_unexpected_error_is_printed_without_the_secret(
    case: Story, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Agent("breaking", instructions="Break.", model=ScriptedModel([breaks]))
    with pytest.raises(CommandError) as caught:
        call_command("run_agent", "breaking", "go")
    shown = str(caught.value) + "".join(traceback.format_exception(caught.value))
    assert "RuntimeError: unexpected [key]" in str(caught.value)
    assert leaks(shown.replace("def breaks", "")) == []
    run("resume_runs")
    assert leaks(caplog.text) == []
    settings.AGENTRUNS_REDACT = None
    with pytest.raises(RuntimeError, match=KEY):
        call_command("run_agent", "breaking", "go")


def test_a_function_that_fails_hides_the_texts(case: Story, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = FAIL
    for command in commands(case):
        outcome = run(*command)
        assert leaks(outcome.out + outcome.err) == [], command
    shown = run("show_run", str(case.done.pk), "--json").lines[0]
    assert (shown["id"], shown["status"], shown["input"]) == (str(case.done.pk), "completed", FAILED)


def test_the_handler_of_a_failing_tool_is_logged_as_ever_without_the_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    turns = [{"tools": [call("explode", key=KEY)]}, {"text": "ok"}]
    Agent("plain", instructions="Go.", tools=[explode], model=ScriptedModel(turns))
    outcome = run("run_agent", "plain", "go")
    assert f"no access with {KEY}" in outcome.out
    assert any(record.exc_info and KEY in str(record.exc_info[1]) for record in caplog.records)
