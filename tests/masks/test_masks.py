"""What is sensitive is shown at no exit to somebody who may not reveal it, and stands in no log record."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import get_resolver
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import agentruns
from agentruns import Agent, approve, run_agent, tool
from agentruns.api import router
from agentruns.journal import masking
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.api.http import Api, make_user
from tests.masks.exits import EXITS, SILENT_COMMANDS, SILENT_PATHS, SILENT_VIEWS
from tests.registry import isolated_registry
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

PIN, IBAN, NUMBER = "pin-Q77001x", "DE02700100100000004711", 880077003311
EVERYTHING = (
    "view_run",
    "erase_payload",
    "view_approval",
    "decide_approval",
    "cancel_run",
    "replay_run",
    "fork_run",
)


def previewed(args: dict[str, Any]) -> dict[str, Any]:
    return {"before": None, "after": {"note": f"with {args['pin']}", "number": args["number"]}, "links": []}


@tool(
    requires_approval=True,
    sensitive=["pin", "number"],
    sensitive_results=["iban"],
    describe=lambda args: f"Send a letter with {args['pin']}",
    preview=previewed,
)
def letter(pin: str, number: int, note: str = "") -> dict[str, Any]:
    """Send a PIN by letter."""
    return {"sent": True, "iban": IBAN, "echo": f"number {number}, pin {pin}"}


@tool(sensitive=["pin"], safe_to_retry=True)
def explode(pin: str) -> str:
    """Fail with the value in the error and in the one that caused it."""
    try:
        raise KeyError(pin)
    except KeyError as error:
        raise RuntimeError(f"not accepted: {pin!r}") from error


def fails_with(args: dict[str, Any], ctx: Any) -> bool:
    raise ValueError(f"cannot tell for {args['pin']}")


@tool(sensitive=["pin"], requires_approval=fails_with, describe=lambda args: 1 / 0 * args["pin"])
def unsure(pin: str) -> str:
    """Its predicate and its description fail."""
    return "done"


def told(pin: str = PIN, number: int = NUMBER, last: str = "") -> Run:
    """Tell a story in which everybody repeats the values; returns the run, which has ended."""
    turns: list[Any] = [
        {
            "text": f"I take {pin} and {number}",
            "tools": [call("letter", pin=pin, number=number, note=f"it is {pin}")],
        },
        {"text": f"The account is {IBAN}", "tools": [call("explode", pin=pin)]},
        {"tools": [call("unsure", pin=pin)]},
        {"text": last or f"Sent {pin} and {number} to {IBAN}."},
    ]
    agent = Agent("clerk", instructions="Write.", tools=[letter, explode, unsure], model=ScriptedModel(turns))
    run = Run.objects.get(pk=run_agent(agent, f"Send {pin}", "letters").run_id)
    while run.status == "awaiting-approval":
        approve(run.approvals.get(status="pending").pk, None, reason=f"yes, {pin}")
        sweep(run_id=run.pk)
        run.refresh_from_db()
    assert run.status == "completed", run.error
    return run


@pytest.fixture
def reader() -> Client:
    client = Client()
    client.force_login(make_user("reader", *EVERYTHING, is_staff=True))
    return client


def shown(client: Client, run: Run) -> dict[str, str]:
    return {f"{exit.__name__} {name}": text for exit in EXITS for name, text in exit(client, run).items()}


def leaks(found: dict[str, str], *values: object) -> dict[str, str]:
    """Return the exits that show a value, with what stands around it."""
    return {
        name: text[max(0, text.index(str(value)) - 60) :][:140]
        for name, text in found.items()
        for value in values
        if str(value) in text
    }


def test_no_exit_shows_what_is_sensitive(reader: Client, settings: Any, caplog: Any) -> None:
    settings.AGENTRUNS_NOTIFY_EMAILS = ["staff@example.org"]
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    caplog.set_level(logging.DEBUG, "agentruns")
    with isolated_registry():
        run = told()
        found = shown(reader, run)
    assert leaks(found, PIN, NUMBER, f"{NUMBER:,}", IBAN) == {}
    assert "***" in found["console run_change"]
    assert "Send ***" in found["api /runs/{run_id}"]
    assert (run.input, run.output) == (f"Send {PIN}", f"Sent {PIN} and {NUMBER} to {IBAN}.")  # as stored
    assert leaks({"log": caplog.text}, PIN, NUMBER, IBAN) == {}
    assert "not accepted: '***'" in caplog.text
    assert "cannot tell for ***" in caplog.text
    ours = [record for record in caplog.records if record.name.startswith("agentruns")]
    assert all(record.exc_info is None for record in ours if record.exc_text)  # no frame, no variable
    entries = LogEntry.objects.values_list("object_repr", "change_message")
    assert leaks({"admin log": str(list(entries))}, PIN, NUMBER, IBAN) == {}


def test_a_waiting_card_shows_nothing_either(reader: Client) -> None:
    with isolated_registry():
        turns = [{"tools": [call("letter", pin=PIN, number=NUMBER, note=f"it is {PIN}")]}]
        agent = Agent("clerk", instructions="Write.", tools=[letter], model=ScriptedModel(turns))
        run = Run.objects.get(pk=run_agent(agent, f"Send {PIN}", "letters").run_id)
        assert leaks(shown(reader, run), PIN, NUMBER) == {}


@hypothesis_settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_values_never_leave(data: st.DataObject) -> None:
    word = st.text("abcXYZ0189 -'\"\\é\n\u3164<&", min_size=6, max_size=30).map(lambda text: f"q{text}q")
    pin = data.draw(word)
    number = data.draw(st.integers(10**9, 10**17))
    mask = masking.Mask([{"tools": {"letter": letter.policy()}}])
    mask.know("letter", {"pin": pin, "number": number})
    text = data.draw(st.text(max_size=20)) + pin + data.draw(st.text(max_size=20))
    value = {"a": [text, number, {"b": f"{number} or {number:,}"}], "c": repr(pin), text: 1.5}
    for made in (mask.value(value), mask.made("letter", value), mask.arguments("other", value)):
        told = str(made)
        assert pin not in told
        assert str(number) not in told
        assert f"{number:,}" not in told


def test_short_values_are_masked_where_they_were_made_from() -> None:
    mask = masking.Mask([{"tools": {"letter": letter.policy()}}])
    mask.know("letter", {"pin": "42", "number": 7, "note": "x"})
    assert mask.made("letter", {"left": "42 left", "other": "142", "n": 7}) == {
        "left": "*** left",
        "other": "142",
        "n": "***",
    }
    assert mask.value("42 is the answer on day 7") == "42 is the answer on day 7"
    mask.know("letter", {"pin": "4711", "number": True})
    assert mask.value(["PIN 4711", 4711, 14711, "2047110", True]) == [
        "PIN ***",
        "***",
        14711,
        "2047110",
        True,
    ]


def test_a_result_of_any_form_is_masked() -> None:
    @tool(sensitive_results=["*"])
    def secret() -> Any:
        """Return a secret."""

    mask = masking.Mask([{"tools": {"secret": secret.policy(), "letter": letter.policy()}}])
    mask.know_result("secret", {"a": ["deep-secret", 990099]})
    assert mask.value("a deep-secret, 990099") == "a ***, ***"
    with pytest.raises(TypeError, match="sensitive_results must be a list"):
        tool(sensitive_results="iban")(lambda: None)


def test_revealing_over_the_api_is_allowed_asked_for_and_logged(caplog: Any, settings: Any) -> None:
    caplog.set_level(logging.INFO, "agentruns.reveals")
    with isolated_registry():
        turns = [{"tools": [call("letter", pin=PIN, number=NUMBER)]}]
        agent = Agent("clerk", instructions="Write.", tools=[letter], model=ScriptedModel(turns))
        waits = run_agent(agent, "Send it", "letters").pending[0]
        plain = Api(make_user("plain", "decide_approval"))
        status, body = plain.get(f"/approvals/{waits.pk}")
        assert (status, body["arguments"]["pin"], body["arguments"]["number"]) == (200, "***", "***")
        status, problem = plain.get(f"/approvals/{waits.pk}?reveal=true")
        assert (status, problem["type"]) == (403, "urn:agentruns:permission-denied")
        assert PIN not in plain.response.content.decode()
        assert [one for one in caplog.records if one.name == "agentruns.reveals"] == []
        may = make_user("may", "decide_approval", "reveal_arguments")
        status, body = Api(may).get(f"/approvals/{waits.pk}")
        assert (status, body["arguments"]["pin"]) == (200, "***")  # nobody sees it unasked
        status, body = Api(may).get(f"/approvals/{waits.pk}?reveal=true")
        assert (body["arguments"]["pin"], body["arguments"]["number"]) == (PIN, NUMBER)
        (record,) = (one for one in caplog.records if one.name == "agentruns.reveals")
        assert f"approval={waits.pk}" in record.getMessage()
        assert f"user={may.pk}" in record.getMessage()
        assert "door=api" in record.getMessage()
        settings.AGENTRUNS_POLICY = "tests.masks.test_masks.Discreet"
        assert Api(may).get(f"/approvals/{waits.pk}?reveal=true")[0] == 403
        status, body = plain.post(f"/approvals/{waits.pk}/approve", {"digest": body["digest"]})
        assert (status, body["status"], body["arguments"]["pin"]) == (200, "approved", "***")
        assert Approval.objects.get(pk=waits.pk).arguments["pin"] == PIN


class Discreet(agentruns.Policy):
    """Reveals nothing."""

    def can_reveal(self, user: Any, shown: Any) -> bool:
        return False


def test_a_mask_does_not_become_an_argument() -> None:
    with isolated_registry():
        turns = [{"tools": [call("letter", pin=PIN, number=NUMBER, note=f"it is {PIN}")]}]
        agent = Agent("clerk", instructions="Write.", tools=[letter], model=ScriptedModel(turns))
        waits = run_agent(agent, "Send it", "letters").pending[0]
        decider = Api(make_user("decider", "decide_approval"))
        shown = decider.get(f"/approvals/{waits.pk}")[1]
        assert shown["arguments"]["note"] == "it is ***"
        edit = {**waits.arguments, "note": "it is ***"}
        status, problem = decider.post(
            f"/approvals/{waits.pk}/approve", {"digest": shown["digest"], "arguments": edit}
        )
        assert (status, "The edited note is only the mask" in problem["detail"]) == (409, True)
        assert Approval.objects.get(pk=waits.pk).status == "pending"


def test_no_exit_is_missing(reader: Client) -> None:
    with isolated_registry():
        found = shown(reader, told())
    views = router.path_operations.items()
    paths = {path for path, view in views if any("GET" in one.methods for one in view.operations)}
    assert {f"api {path}" for path in paths - SILENT_PATHS} <= set(found)
    ours = ("agentruns_run_", "agentruns_approval_")
    names = {name.removeprefix("agentruns_") for name in _names() if name.startswith(ours)}
    assert {f"console {name}" for name in names - SILENT_VIEWS} <= set(found)
    folder = Path(agentruns.__file__).parent / "management/commands"
    commands = {path.stem for path in folder.glob("[a-z]*.py")}
    assert {f"commands {name}" for name in commands - SILENT_COMMANDS} <= set(found)


def _names() -> set[str]:
    """Return the names of the admin's URLs."""
    admin = get_resolver().namespace_dict["admin"][1]
    return {str(key) for key in admin.reverse_dict if isinstance(key, str)}
