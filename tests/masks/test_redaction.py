"""No answer, command or log holds what AGENTRUNS_REDACT takes out, nor a sensitive value outside its card."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from agentruns import Agent, approve
from agentruns.models import Approval, Message, Run
from agentruns.testing import ScriptedModel
from agentruns.utils.redaction import FAILED
from tests.api.http import Api, make_user
from tests.commands.running import run as command
from tests.redacting import CARD, FAIL, HIDE, KEY, PIN, Story, leaks, story

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def everybody(db: None) -> Any:
    return make_user("everybody", "start_run", "view_run", "decide_approval", "cancel_run", "resume_run")


@pytest.fixture
def owned(everybody: Any, settings: Any) -> Story:
    settings.AGENTRUNS_REDACT = HIDE
    return story(everybody)


@pytest.fixture
def client(everybody: Any) -> Api:
    return Api(everybody)


def reads(owned: Story) -> list[str]:
    """Return the path of everything that can be read about the story."""
    found = ["/runs", "/runs?status=failed", f"/runs?session=talk {CARD}", "/approvals"]
    found += [f"/approvals?status={status}" for status in Approval.Status.values]
    found += [f"/approvals/{approval.pk}" for approval in Approval.objects.all()]
    for run in owned.runs:
        found += [f"/runs/{run.pk}", f"/runs/{run.pk}/messages"]
    return found


def answers(client: Api, paths: list[str]) -> dict[str, str]:
    """Return what each path answers, as text."""
    found = {}
    for path in paths:
        status, body = client.get(path)
        assert status == 200, (path, body)
        found[path] = client.response.content.decode() + json.dumps(body, ensure_ascii=False)
    return found


def test_nothing_that_is_read_holds_a_secret(owned: Story, client: Api, settings: Any) -> None:
    run, card = f"/runs/{owned.done.pk}", f"/approvals/{owned.waiting.pk}"
    messages = f"{run}/messages"
    found = answers(client, reads(owned))
    assert {path: leaks(text) for path, text in found.items() if leaks(text)} == {}
    assert [path for path, text in found.items() if PIN in text] == []
    assert '"pin": "***"' in found[messages]
    # A function that fails hides the texts, and leaves the rest.
    settings.AGENTRUNS_REDACT = FAIL
    assert leaks("".join(answers(client, reads(owned)).values())) == []
    shown, rows = client.get(run)[1], owned.done.messages.order_by("seq")
    assert (shown["input"], shown["output"], shown["id"]) == (FAILED, FAILED, str(owned.done.pk))
    assert [row["kind"] for row in client.get(messages)[1]["items"]] == [row.kind for row in rows]
    # Without one, texts are as they are, but for what is sensitive.
    settings.AGENTRUNS_REDACT = None
    shown, rows = client.get(run)[1], owned.failed.messages.order_by("seq")
    assert (shown["input"], shown["output"]) == (owned.done.input, owned.done.output)
    shown = client.get(f"/runs/{owned.failed.pk}/messages")[1]["items"]
    kept = [{name: row.payload[name] for name in row.payload.keys() - {"key_hash"}} for row in rows]
    assert [row["payload"] for row in shown] == kept
    assert client.get(card)[1]["arguments"] == {**owned.waiting.arguments, "pin": "***"}


def test_ids_digests_hashes_and_statuses_are_the_true_ones(owned: Story, client: Api) -> None:
    approval = owned.waiting
    _, shown = client.get(f"/approvals/{approval.pk}")
    true = (str(approval.pk), str(approval.run_id), approval.digest, "pending", approval.call_id)
    assert (shown["id"], shown["run"], shown["digest"], shown["status"], shown["call_id"]) == true
    assert shown["arguments"] == {
        "card": "[card]", "number": "[card]", "note": {"[key]": ["line\n[card]\nline"]}, "pin": "***",
    }  # fmt: skip
    assert shown["title"] == "Charge [card]"
    _, page = client.get(f"/runs/{owned.done.pk}/messages")
    rows = owned.done.messages.order_by("seq")
    assert [row["hash"] for row in page["items"]] == [row.hash for row in rows]
    assert [row["kind"] for row in page["items"]] == [row.kind for row in rows]
    _, run = client.get(f"/runs/{owned.done.pk}")
    assert (run["output"], run["session"]) == ("done with [card]\nand [key]", "talk [card]")
    assert (run["definition"], run["usage"]) == (owned.done.definition_id, owned.done.usage)
    assert [one["id"] for one in client.get(f"/runs?session=talk {CARD}")[1]["items"]] == [run["id"]]
    code, shown = client.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})
    assert (code, shown["status"], shown["arguments"]["card"]) == (200, "approved", "[card]")
    assert Approval.objects.get(pk=approval.pk).arguments["card"] == CARD


def test_errors_and_changes_hold_no_secret(owned: Story, client: Api) -> None:
    decided = Approval.objects.get(status="denied")
    path = f"/approvals/{owned.waiting.pk}"
    shown = client.get(path)[1]["arguments"]
    edits = {"digest": owned.waiting.digest, "arguments": {**owned.waiting.arguments, "card": shown["card"]}}
    posts: list[tuple[str, Any, int]] = [
        ("/runs", {"agent": "keeper", "input": "other", "session": f"waits {CARD}"}, 409),
        ("/runs", {"agent": KEY, "input": "go"}, 422),
        ("/runs", {"agent": "keeper", "input": "go", CARD: 1}, 422),
        ("/runs", {"agent": "keeper", "input": f"later {CARD}", "session": f"queued {CARD}"}, 200),
        (f"/runs/{owned.done.pk}/resume", None, 409),
        (f"/approvals/{decided.pk}/deny", {"digest": decided.digest, "reason": "again"}, 409),
        (path + "/approve", edits, 409),
        (path + "/deny", {"digest": owned.waiting.digest, "reason": f"no {KEY}"}, 200),
        (f"/runs/{owned.queued.pk}/cancel", {"reason": f"not {CARD}"}, 200),
    ]
    for where, body, status in posts:
        code, answer = client.post(where, body)
        assert code == status, (where, answer)
        assert leaks(client.response.content.decode()) == [], where
        if body is edits:
            assert answer["type"] == "urn:agentruns:approval-state"
            assert "The edited card holds the mask" in answer["detail"]
    assert Approval.objects.get(pk=owned.waiting.pk).reason == f"no {KEY}"
    assert leaks("".join(answers(client, reads(owned)).values())) == []


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
    return [words + more for words in plain for more in ((), ("--json",))]


def test_no_command_prints_a_secret(case: Story, settings: Any) -> None:
    def printed() -> str:
        told = ""
        for words in commands(case):
            outcome = command(*words)
            assert outcome.out or outcome.err, words
            assert PIN not in outcome.out, words
            told += outcome.out + outcome.err
        return told

    assert leaks(printed()) == []
    shown = command("show_run", str(case.done.pk)).out
    for text in ("talk [card]", "done with [card]", "no access with [key]", "[key] leaked", 'pin="***"'):
        assert text in shown
    assert "[key] is not valid for [card]" in command("show_run", str(case.failed.pk)).out
    # What JSON names is true, and what it says is redacted.
    told = command("show_run", str(case.done.pk), "--json").lines[0]
    rows = list(Message.objects.filter(run=case.done).order_by("seq"))
    assert (told["id"], told["definition"]) == (str(case.done.pk), case.done.definition_id)
    assert [row["hash"] for row in told["messages"]] == [row.hash for row in rows]
    assert (told["session"], told["output"]) == ("talk [card]", "done with [card]\nand [key]")
    replies = [row["payload"] for row in told["messages"] if row["kind"] == "assistant"]
    asked = next(each for each in replies if each["calls"][0]["tool"] == "charge")
    assert asked["calls"][0]["arguments"]["pin"] == asked["content"][1]["input"]["pin"] == "***"
    # A function that fails hides the texts. Without one, what is sensitive is hidden.
    settings.AGENTRUNS_REDACT = FAIL
    assert leaks(printed()) == []
    told = command("show_run", str(case.done.pk), "--json").lines[0]
    assert (told["id"], told["status"], told["input"]) == (str(case.done.pk), "completed", FAILED)
    settings.AGENTRUNS_REDACT = None
    assert f"talk {CARD}" in printed()


def test_a_repair_prints_no_secret(case: Story) -> None:
    # Said with at most 100 characters: half of the card would be left of it.
    Run.objects.filter(pk=case.done.pk).update(output=f"{'x' * 88} {CARD}", error=KEY)
    told_of = {"": "is 'xx", "--json": "is 'xx", "--repair": "rewritten from 'xx"}
    for option, told in told_of.items():
        words = ["verify_journal", *([option] if option else [])]
        outcome = command(*words)
        assert f"output {told}" in outcome.out, outcome.out
        assert leaks(outcome.out) == [], words
    assert Run.objects.get(pk=case.done.pk).output == f"done with {CARD}\nand {KEY}"


def test_no_log_holds_a_secret(case: Story, caplog: pytest.LogCaptureFixture) -> None:
    approve(case.waiting.pk, None)
    command("resume_runs")
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
    command("resume_runs")
    assert leaks(caplog.text) == []
    settings.AGENTRUNS_REDACT = None
    with pytest.raises(RuntimeError, match=KEY):
        call_command("run_agent", "breaking", "go")
