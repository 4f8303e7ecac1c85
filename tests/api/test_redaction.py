"""No answer of the API holds what AGENTRUNS_REDACT takes out, nor a sensitive argument outside its card."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentruns.models import Approval, Run
from agentruns.utils.redaction import FAILED
from tests.api.http import Api, make_user
from tests.redacting import CARD, FAIL, HIDE, KEY, PIN, Story, leaks, story

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def everybody(db: None) -> Any:
    return make_user("everybody", "start_run", "view_run", "decide_approval", "cancel_run", "resume_run")


@pytest.fixture
def case(everybody: Any, settings: Any) -> Story:
    settings.AGENTRUNS_REDACT = HIDE
    return story(everybody)


@pytest.fixture
def client(everybody: Any) -> Api:
    return Api(everybody)


def reads(case: Story) -> list[str]:
    """Return the path of everything that can be read about the story."""
    found = ["/runs", "/runs?status=failed", f"/runs?session=talk {CARD}", "/approvals"]
    found += [f"/approvals?status={status}" for status in Approval.Status.values]
    found += [f"/approvals/{approval.pk}" for approval in Approval.objects.all()]
    for run in case.runs:
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


def test_nothing_that_is_read_holds_a_secret(case: Story, client: Api) -> None:
    found = answers(client, reads(case))
    assert {path: leaks(text) for path, text in found.items() if leaks(text)} == {}


def test_ids_digests_hashes_and_statuses_are_the_true_ones(case: Story, client: Api) -> None:
    approval = case.waiting
    _, shown = client.get(f"/approvals/{approval.pk}")
    true = (str(approval.pk), str(approval.run_id), approval.digest, "pending", approval.call_id)
    assert (shown["id"], shown["run"], shown["digest"], shown["status"], shown["call_id"]) == true
    assert shown["arguments"] == {
        "card": "[card]", "number": "[card]", "note": {"[key]": ["line\n[card]\nline"]}, "pin": "***",
    }  # fmt: skip
    assert shown["title"] == "Charge [card]"
    _, page = client.get(f"/runs/{case.done.pk}/messages")
    rows = case.done.messages.order_by("seq")
    assert [row["hash"] for row in page["items"]] == [row.hash for row in rows]
    assert [row["kind"] for row in page["items"]] == [row.kind for row in rows]
    _, run = client.get(f"/runs/{case.done.pk}")
    assert (run["output"], run["session"]) == ("done with [card]\nand [key]", "talk [card]")
    assert (run["definition"], run["usage"]) == (case.done.definition_id, case.done.usage)
    assert [one["id"] for one in client.get(f"/runs?session=talk {CARD}")[1]["items"]] == [run["id"]]


def test_sensitive_arguments_are_shown_to_nobody_who_does_not_ask(case: Story, client: Api) -> None:
    found = answers(client, reads(case))
    assert [path for path, text in found.items() if PIN in text] == []
    assert '"pin": "***"' in found[f"/runs/{case.done.pk}/messages"]


def test_errors_and_changes_hold_no_secret(case: Story, client: Api) -> None:
    decided = Approval.objects.get(status="denied")
    true = case.waiting.arguments
    shown = client.get(f"/approvals/{case.waiting.pk}")[1]["arguments"]
    edits = {"digest": case.waiting.digest, "arguments": {**true, "card": shown["card"]}}
    posts: list[tuple[str, Any, int]] = [
        ("/runs", {"agent": "keeper", "input": "other", "session": f"waits {CARD}"}, 409),
        ("/runs", {"agent": KEY, "input": "go"}, 422),
        ("/runs", {"agent": "keeper", "input": "go", CARD: 1}, 422),
        ("/runs", {"agent": "keeper", "input": f"later {CARD}", "session": f"queued {CARD}"}, 200),
        (f"/runs/{case.done.pk}/resume", None, 409),
        (f"/approvals/{decided.pk}/deny", {"digest": decided.digest, "reason": "again"}, 409),
        (f"/approvals/{case.waiting.pk}/approve", edits, 409),
        (
            f"/approvals/{case.waiting.pk}/deny",
            {"digest": case.waiting.digest, "reason": f"no {KEY}"},
            200,
        ),
        (f"/runs/{case.queued.pk}/cancel", {"reason": f"not {CARD}"}, 200),
    ]
    for path, body, status in posts:
        code, answer = client.post(path, body)
        assert code == status, (path, answer)
        assert leaks(client.response.content.decode()) == [], path
    assert Approval.objects.get(pk=case.waiting.pk).reason == f"no {KEY}"
    assert leaks("".join(answers(client, reads(case)).values())) == []


def test_an_edit_with_what_was_shown_is_refused_and_names_the_argument(case: Story, client: Api) -> None:
    _, shown = client.get(f"/approvals/{case.waiting.pk}")
    arguments = {**case.waiting.arguments, "card": shown["arguments"]["card"]}
    code, problem = client.post(
        f"/approvals/{case.waiting.pk}/approve", {"digest": shown["digest"], "arguments": arguments}
    )
    assert (code, problem["type"]) == (409, "urn:agentruns:approval-state")
    assert "The edited card holds the mask" in problem["detail"]
    assert Approval.objects.get(pk=case.waiting.pk).status == "pending"


def test_an_approval_of_redacted_arguments_is_of_the_true_ones(case: Story, client: Api) -> None:
    code, shown = client.post(f"/approvals/{case.waiting.pk}/approve", {"digest": case.waiting.digest})
    assert (code, shown["status"], shown["arguments"]["card"]) == (200, "approved", "[card]")
    assert Approval.objects.get(pk=case.waiting.pk).arguments["card"] == CARD


def test_a_function_that_fails_hides_the_texts_and_leaves_the_rest(
    case: Story, client: Api, settings: Any
) -> None:
    settings.AGENTRUNS_REDACT = FAIL
    found = answers(client, reads(case))
    assert leaks("".join(found.values())) == []
    _, run = client.get(f"/runs/{case.done.pk}")
    assert (run["input"], run["output"], run["id"]) == (FAILED, FAILED, str(case.done.pk))
    _, page = client.get(f"/runs/{case.done.pk}/messages")
    assert [row["kind"] for row in page["items"]] == [row.kind for row in case.done.messages.order_by("seq")]


def test_without_the_setting_texts_are_as_they_are(case: Story, client: Api, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = None
    _, run = client.get(f"/runs/{case.done.pk}")
    assert (run["input"], run["output"]) == (case.done.input, case.done.output)
    _, page = client.get(f"/runs/{case.failed.pk}/messages")
    assert [row["payload"] for row in page["items"]] == [
        row.payload for row in Run.objects.get(pk=case.failed.pk).messages.order_by("seq")
    ]
    _, approval = client.get(f"/approvals/{case.waiting.pk}")
    assert approval["arguments"] == {**case.waiting.arguments, "pin": "***"}
