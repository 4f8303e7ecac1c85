"""What is sensitive is shown at no exit to somebody who may not reveal it, and stands in no log record."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import AnonymousUser
from django.test import Client, override_settings
from django.urls import get_resolver
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

import agentruns
from agentruns import Agent, Policy, RunContext, approve, get_approval, run_agent, tool
from agentruns.api import router
from agentruns.exceptions import NotFoundError, ToolDurabilityError
from agentruns.journal import masking
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.tools import InvalidArguments
from tests.api.http import Api, make_user
from tests.files import fetch_secretly, fetched
from tests.masks.exits import EXITS, SILENT_COMMANDS, SILENT_PATHS, SILENT_VIEWS
from tests.registry import isolated_registry
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

PIN, IBAN, NUMBER = "pin-Q77001x", "DE02700100100000004711", 880077003311
EVERYTHING = (
    "view_run", "erase_payload", "view_approval", "decide_approval", "cancel_run", "replay_run", "fork_run",
)  # fmt: skip


def previewed(args: dict[str, Any]) -> dict[str, Any]:
    return {"before": None, "after": {"note": f"with {args['pin']}", "number": args["number"]}, "links": []}


@tool(
    requires_approval=True, sensitive=["pin", "number"], sensitive_results=["iban"],
    describe=lambda args: f"Send a letter with {args['pin']}, or {PIN}", preview=previewed,
)  # fmt: skip
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


def told() -> Run:
    """Tell a story in which everybody repeats the values; return the run, which has ended."""
    writes = call("letter", pin=PIN, number=NUMBER, note=f"it is {PIN}")
    turns: list[Any] = [
        {"text": f"I take {PIN} and {NUMBER}", "tools": [writes]},
        {"text": f"The account is {IBAN}", "tools": [call("explode", pin=PIN)]},
        {"tools": [call("unsure", pin=PIN)]},
        {"text": f"Sent {PIN} and {NUMBER} to {IBAN}."},
    ]
    agent = Agent("clerk", instructions="Write.", tools=[letter, explode, unsure], model=ScriptedModel(turns))
    run = Run.objects.get(pk=run_agent(agent, f"Send {PIN}", "letters").run_id)
    while run.status == "awaiting-approval":
        approve(run.approvals.get(status="pending").pk, None, reason=f"yes, {PIN}")
        sweep(run_id=run.pk)
        run.refresh_from_db()
    assert run.status == "completed", run.error
    return run


@pytest.fixture
def reader() -> Client:
    return Api(make_user("reader", *EVERYTHING, is_staff=True)).client


def waiting(**more: str) -> Approval:
    """Let a letter wait for its approval."""
    turns = [{"tools": [call("letter", pin=PIN, number=NUMBER, **more)]}]
    agent = Agent("clerk", instructions="Write.", tools=[letter], model=ScriptedModel(turns))
    return run_agent(agent, f"Send {PIN}", "letters").pending[0]


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
    run = told()
    found = shown(reader, run)
    assert missing(found) == set(), "exits that tests/masks/exits.py does not know"
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
    waits = waiting(note=f"it is {PIN}").run
    assert leaks(shown(reader, waits), PIN, NUMBER) == {}, "a waiting card shows nothing either"


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
    for made in (mask.json(value), mask.tool_text("letter", value), mask.arguments("other", value)):
        told = str(made)
        assert pin not in told
        assert str(number) not in told
        assert f"{number:,}" not in told


def test_short_values_are_masked_where_they_were_made_from_and_results_of_any_form_everywhere() -> None:
    @tool(sensitive_results=["*"])
    def secret() -> Any:
        """Return a secret."""

    mask = masking.Mask([{"tools": {"secret": secret.policy(), "letter": letter.policy()}}])
    mask.know("letter", {"pin": "42", "number": 7, "note": "x"})
    made = mask.tool_text("letter", {"left": "42 left", "other": "142", "n": 7})
    assert made == {"left": "*** left", "other": "142", "n": "***"}
    assert mask.json("42 is the answer on day 7") == "42 is the answer on day 7"
    mask.know("letter", {"pin": "4711", "number": True})
    value = mask.json(["PIN 4711", 4711, 14711, "2047110", True])
    assert value == ["PIN ***", "***", 14711, "2047110", True]
    assert mask.json("4711, 4712, 47 11") == "***, 4712, 47 11", "exact values only"
    mask.know_result("secret", {"a": ["deep-secret", 990099]})
    assert mask.json("a deep-secret, 990099; a Deep-Secret") == "a ***, ***; a Deep-Secret"
    with pytest.raises(TypeError, match="sensitive_results must be a list"):
        tool(sensitive_results="iban")(lambda: None)


def test_revealing_over_the_api_is_allowed_asked_for_and_logged(caplog: Any, settings: Any) -> None:
    caplog.set_level(logging.INFO, "agentruns.reveals")
    waits = waiting()
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
    settings.AGENTRUNS_POLICY = f"{__name__}.Discreet"
    assert Api(may).get(f"/approvals/{waits.pk}?reveal=true")[0] == 403
    status, body = plain.post(f"/approvals/{waits.pk}/approve", {"digest": body["digest"]})
    assert (status, body["status"], body["arguments"]["pin"]) == (200, "approved", "***")
    assert Approval.objects.get(pk=waits.pk).arguments["pin"] == PIN


def test_a_projects_own_page_gets_an_approval_as_one_person_may_see_it(settings: Any) -> None:
    waits = waiting(note="a letter")
    clerk, viewer = make_user("clerk", "decide_approval"), make_user("viewer", "view_approval")
    seen, listed = get_approval(waits.pk, clerk), Api(clerk).get(f"/approvals/{waits.pk}")[1]
    assert (seen.may_decide, get_approval(str(waits.pk), viewer).may_decide) == (True, False)
    assert (seen.approval.arguments, seen.approval.title) == (listed["arguments"], listed["title"])
    assert (seen.approval.arguments["pin"], seen.approval.digest) == ("***", waits.digest)
    assert (seen.preview["after"], seen.asked_by) == ({"note": "with ***", "number": "***"}, "")
    settings.AGENTRUNS_REDACT = f"{__name__}.no_letters"
    assert get_approval(waits.pk, clerk).approval.arguments["note"] == "a [redacted]"
    gone = make_user("gone", "view_approval", is_active=False)
    for nobody in (make_user("stranger"), gone, AnonymousUser(), None):
        with pytest.raises(NotFoundError, match=f"There is no approval {waits.pk}"):
            get_approval(waits.pk, nobody)
    hiding = override_settings(AGENTRUNS_POLICY=f"{__name__}.Discreet")
    with hiding, pytest.raises(NotFoundError):
        get_approval(waits.pk, clerk)
    edited = {"pin": "pin-new-0002", "number": 5, "note": ""}
    approve(waits.pk, clerk, digest=seen.approval.digest, arguments=edited)
    after = get_approval(waits.pk, clerk)
    decided = (after.approval.status, after.approval.decided_by_name, after.may_decide)
    assert decided == ("approved", "clerk", False)
    assert after.preview["after"] == {"note": "with ***", "number": "***"}
    with pytest.raises(NotFoundError, match="no approval x"):
        get_approval("x" * 400, clerk)


def no_letters(text: str) -> str:
    return text.replace("letter", "[redacted]")


class Discreet(agentruns.Policy):
    """Reveals nothing, and hides approvals."""

    def visible_approvals(self, user: Any, approvals: Any) -> Any:
        return approvals.none() if user.username == "clerk" else approvals

    def can_reveal(self, user: Any, shown: Any) -> bool:
        return False


def test_a_mask_does_not_become_an_argument() -> None:
    waits = waiting(note=f"it is {PIN}")
    decider = Api(make_user("decider", "decide_approval"))
    shown = decider.get(f"/approvals/{waits.pk}")[1]
    assert shown["arguments"]["note"] == "it is ***"
    body = {"digest": shown["digest"], "arguments": {**waits.arguments, "note": "it is ***"}}
    status, problem = decider.post(f"/approvals/{waits.pk}/approve", body)
    assert (status, "The edited note is only the mask" in problem["detail"]) == (409, True)
    assert Approval.objects.get(pk=waits.pk).status == "pending"


def missing(found: dict[str, str]) -> set[str]:
    """List the exits there are that are not among those found."""
    views = router.path_operations.items()
    paths = {path for path, view in views if any("GET" in one.methods for one in view.operations)}
    patterns = get_resolver().namespace_dict["admin"][1].reverse_dict
    ours = [name for name in patterns if str(name).startswith(("agentruns_run_", "agentruns_approval_"))]
    names = {name.removeprefix("agentruns_") for name in ours}
    folder = Path(agentruns.__file__).parent / "management/commands"
    commands = {path.stem for path in folder.glob("[a-z]*.py")}
    exits = {f"api {path}" for path in paths - SILENT_PATHS}
    exits |= {f"console {name}" for name in names - SILENT_VIEWS}
    exits |= {f"commands {name}" for name in commands - SILENT_COMMANDS}
    return exits - set(found)


@tool(requires_approval=True, sensitive=["pin"])
def unlock(pin: str) -> str:
    """Open a door."""
    return "open"


def reading(*more: str) -> Api:
    return Api(make_user("reader", "view_run", "view_approval", *more, is_staff=True))


def asking(*calls: Any, task: str = "open it", **options: Any) -> Any:
    agent = shop_agent("doors", {"tools": [*calls]}, tools=[unlock, look])
    return run_agent(agent, task, "s1", **options)


def unlocking(task: str = "open it", pin: str = PIN, **options: Any) -> Any:
    return asking(call("unlock", pin=pin), task=task, **options)


def test_a_fork_masks_the_values_of_the_calls_that_it_copied() -> None:
    run = unlocking(f"open with {PIN}", actor=make_user("customer"))
    api = reading("fork_run", "start_run")
    assert PIN not in str(api.get(f"/runs/{run.run_id}"))
    seq = Message.objects.get(run_id=run.run_id, kind="assistant").seq
    status, fork = api.post(f"/runs/{run.run_id}/fork", {"at": seq})
    assert status == 201
    assert PIN not in str(fork) + str(api.get(f"/runs/{fork['id']}/messages"))


args_seen: list[dict[str, Any]] = []  # what the descriptions of a tool got


def describes(args: dict[str, Any]) -> str:
    args_seen.append(args)
    return f"Pay {args['cents'] / 100:.2f} with {args['pin']} for {args['about']}"


@tool(requires_approval=True, sensitive=["pin"], describe=describes)
def pay(cents: int, pin: str, about: str = "") -> str:
    """Pay."""
    return "paid"


@tool(safe_to_retry=True, sensitive=["cents"], describe=describes)
def refund(cents: int, pin: str = "", about: str = "") -> str:
    """Pay back; the sentence is made for the page of the run only, and needs a number."""
    return "paid back"


def test_no_description_gets_a_sensitive_value_and_no_stored_title_has_one() -> None:
    args_seen.clear()
    edited, staff = "pin-edited-Q9", make_user("staff", is_superuser=True, is_staff=True)
    calls = [call("pay", cents=1250, pin=PIN, about="tea"), call("refund", cents=NUMBER)]
    agent = shop_agent("payer", {"tools": calls}, {"text": "Done."}, tools=[pay, refund])
    (card,) = run_agent(agent, "pay it", "s1").pending
    assert card.title == "Pay 12.50 with *** for tea"
    approve(card.pk, staff, arguments={"cents": 1300, "pin": edited, "about": f"not {PIN}"})
    sweep()
    page = Api(staff).client.get(f"/admin/agentruns/run/{card.run_id}/change/").content.decode()
    assert {(each["cents"], each["pin"]) for each in args_seen} == {(1250, "***"), (1300, "***"), ("***", "")}
    assert refund.title({"cents": NUMBER, "about": "tea"}) == "refund(cents=***, about='tea')", "as it fails"
    titles = {*Approval.objects.values_list("title", flat=True)}
    titles |= {row.payload["title"] for row in Message.objects.all() if "title" in row.payload}
    assert titles == {"Pay 12.50 with *** for tea", f"Pay 13.00 with *** for not {PIN}"}, (
        "which `about` repeats"
    )
    assert PIN not in str(reading().get(f"/approvals/{card.pk}")) + page, (
        "and that is masked when it is shown"
    )
    assert Approval.objects.get().arguments["pin"] == edited, "the call has the true values"


@tool(sensitive_results=["iban"])
def look() -> dict[str, str]:
    """Look a customer up."""
    raise ValueError(f"the account {PIN} is blocked")


REPEATS: dict[str, Callable[[], Any]] = {
    "the context": lambda: unlocking(context={"pin": PIN}),
    "a value under a misspelt name": lambda: asking(call("unlock", Pin=PIN)),
    "the error of a tool with sensitive results": lambda: asking(call("look")),
}


@pytest.mark.parametrize("what", REPEATS)
def test_what_repeats_a_value_is_masked(what: str) -> None:
    run, api = REPEATS[what](), reading()
    assert PIN not in str(api.get(f"/runs/{run.run_id}/messages"))
    assert PIN not in str(api.get(f"/runs/{run.run_id}"))


def test_the_hash_of_a_guarded_task_or_result_is_not_shown(folder: Path, settings: Any) -> None:
    run, api = fetched(tools=[fetch_secretly], session="s2"), reading()
    row = Message.objects.get(run=run, kind="tool_result")
    page = api.client.get(f"/admin/agentruns/run/{run.pk}/rows/{row.seq}/content/").content.decode()
    assert row.payload["stored"]["sha256"] not in page + str(api.get(f"/runs/{run.pk}/messages"))
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = 2_000
    task = "Dear agent. " * 300 + "The PIN is {}"
    waits = unlocking(task.format("7306"), "7306")
    assert api.get(f"/runs/{waits.run_id}/messages/2/content")[0] == 403
    told = json.dumps(api.get(f"/runs/{waits.run_id}/messages")[1])
    pins = ("7305", "7306", "7307")
    hashes = {pin: hashlib.sha256(task.format(pin).encode()).hexdigest() for pin in pins}
    assert [pin for pin in pins if hashes[pin] in told] == []


class Fails(Policy):
    """Its rule is broken: the kind of error that says what it could not handle."""

    is_broken = False

    def can_decide(self, user: Any, approval: Any, arguments: dict[str, Any]) -> bool:
        if Fails.is_broken:
            raise ValueError(f"no limit for {arguments['pin']}")
        return True


def logged(caplog: pytest.LogCaptureFixture) -> str:
    form = logging.Formatter()
    return "\n".join(form.format(one) for one in caplog.records if one.name.startswith("agentruns"))


@pytest.mark.parametrize("where", ["decision", "edit", "engine"])
def test_a_policy_that_raises_logs_no_value(
    where: str, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Fails"
    (card,) = unlocking().pending
    decider = make_user("decider", "decide_approval")
    if where == "engine":
        approve(card.pk, decider)
    monkeypatch.setattr(Fails, "is_broken", True)
    if where == "engine":
        sweep()
    else:
        edited = {"arguments": {"pin": PIN}} if where == "edit" else {}
        Api(decider).post(f"/approvals/{card.pk}/approve", {"digest": card.digest, **edited})
    assert "AGENTRUNS_POLICY failed" in logged(caplog)
    assert PIN not in logged(caplog)


@tool(sensitive=["pin"])
def open_late(pin: str) -> str:
    """Open a door, and do not know whether it opened."""
    raise ToolDurabilityError("no answer of the door")


def test_what_staff_wrote_of_a_run_is_masked_in_its_history() -> None:
    client = Api(make_user("staff", is_superuser=True, is_staff=True)).client
    reads = reading().client
    waits = unlocking().run_id
    form = {"action": "cancel_selected", "_selected_action": [waits], "reason": f"not with {PIN}"}
    seen = str(Message.objects.filter(run_id=waits).latest("seq").seq)
    page = client.post("/admin/agentruns/run/", {**form, "confirmed": "1", f"seen-{waits}": seen})
    assert b"1 was done" in page.content
    agent = shop_agent("late", {"tools": [call("open_late", pin=PIN)]}, tools=[open_late])
    doubt = run_agent(agent, "open it", "s2")
    about = {"verdict": "unknown", "evidence": f"nobody knows {PIN}"}
    about["seq"] = str(Message.objects.filter(run_id=doubt.run_id).latest("seq").seq)
    answer = client.post(f"/admin/agentruns/run/{doubt.run_id}/calls/{doubt.orphans[0]}/resolve/", about)
    assert answer.status_code == 302
    for run_id, said in ((waits, "not with"), (doubt.run_id, "nobody knows")):
        history = reads.get(f"/admin/agentruns/run/{run_id}/history/").content.decode()
        assert f"{said} ***" in history
        assert PIN not in history


MAY = ("view_run", "fork_run", "start_run", "adopt_definition")


def serves(run: RunContext) -> str:
    """Tell what is said of the run."""
    return f"Serve {run.context.get('note', 'nobody')}."


def fails(run: RunContext) -> str:
    """Fail, and say why."""
    raise ValueError(f"cannot serve {run.context}")


def misfits(run: RunContext) -> str:
    """Fail by an exception of ours that doors show elsewhere."""
    raise InvalidArguments(f"cannot serve {run.context}")


@pytest.mark.parametrize("instructions", [fails, misfits])
@pytest.mark.parametrize("door", ["again", "fork", "adopt", "api", "api messages", "api runs"])
def test_what_a_function_of_an_agent_raises_is_masked(
    caplog: pytest.LogCaptureFixture, door: str, instructions: Any
) -> None:
    turn = {"tools": [{"name": "unlock", "input": {"pin": PIN}}]}
    model = ScriptedModel([turn, turn] if door == "adopt" else [turn, {"text": "done"}])
    options: dict[str, Any] = {"tools": [unlock], "model": model, "starters": "anyone"}
    user = make_user("vv", *MAY, is_staff=True)
    plain = "Serve." if door == "adopt" else serves
    Agent("pins", instructions=plain, **options)
    run = run_agent("pins", "check it", "s1", actor=user, context={"note": PIN}).run_id
    approve(Approval.objects.get().pk, make_user("boss", is_superuser=True))
    sweep()
    client: Any = Client(raise_request_exception=False)
    client.force_login(user)
    page = f"/admin/agentruns/run/{run}/"
    assert PIN not in client.get(f"{page}change/").getvalue().decode()
    caplog.clear()
    with isolated_registry():
        agent = Agent("pins", instructions=instructions, **options)
        body: dict[str, Any] = {"at": 2, "text": "x"}
        api = {
            "api": (f"runs/{run}/fork", body), "api messages": ("sessions/s1/messages", {"content": "x"}),
            "api runs": ("runs", {"agent": "pins", "input": "x", "session": "s1"}),
        }  # fmt: skip
        if door in api:
            path, body = api[door]
            shown = client.post(f"/api/{path}", json.dumps(body), content_type="application/json")
            assert (shown.status_code, shown.json()["type"]) == (500, "urn:agentruns:rendering")
        else:
            if door == "adopt":
                seq = Message.objects.filter(run_id=run).latest("seq").seq
                body = {"hash": agent.definition_hash, "seq": seq, "reason": "newer"}
            started = Message.objects.filter(run_id=run, kind="tool_started")
            body["knows"] = list(started.values_list("call_id", flat=True))
            shown = client.post(f"{page}{door}/", {"key": "k", **body})
            assert shown.status_code == 409
    assert "its function instructions failed with" in shown.getvalue().decode()
    assert PIN not in shown.getvalue().decode()
    logged = "".join(map(logging.Formatter().format, caplog.records))
    assert PIN not in logged
    assert logged.count("Traceback") == 1
    assert Run.objects.count() == 1
