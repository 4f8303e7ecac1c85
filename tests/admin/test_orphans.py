"""The card of a call in doubt: what staff see of it, what each verdict does, and who comes too late."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from agentruns import ToolContext, Unknown, approve, cancel_run, resume_run, run_agent, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.recovery import AFTER_UNKNOWN, UNKNOWN
from agentruns.sweep import sweep
from tests.admin.conftest import World
from tests.admin.pages import Page, read, snapshot, url
from tests.admin.people import ROLES, browser, user
from tests.admin.test_hostile_text import HOSTILE
from tests.crash.processes import wait_for
from tests.db.helpers import kill
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]

EVIDENCE = "the bank's statement of today"


@tool
def wire(ctx: ToolContext, text: str) -> str:
    """Send a wire. Of the first attempt nobody knows whether it went out."""
    Effects.from_environment().record(ctx.idempotency_key, tool="wire", attempt=ctx.attempt)
    if ctx.attempt == 1:
        raise ToolDurabilityError(f"no answer to {text}")
    return "wired"


def start(*turns: Any, session: str = "s1", key: str = "", tools: Any = (), **options: Any) -> Run:
    key = key or session
    agent = shop_agent(f"agent-{key}", *turns, tools=[*TOOLS, wire, *tools], **options)
    result = run_agent(agent, "do it", session, idempotency_key=key)
    return Run.objects.get(pk=result.run_id)


def held(*later: Any, session: str = "s1", text: str = "x", **options: Any) -> Run:
    """A run whose wire is in doubt, and that waits for staff."""
    run = start({"tools": [call("wire", text=text), *later]}, session=session, **options)
    assert run.status == "orphaned"
    return run


def told(session: str = "s1") -> Run:
    """A run that ended after its model was told that the outcome of a wire is unknown."""
    run = held(session=session)
    assert resume_run(run.pk).status == "completed"
    run.refresh_from_db()
    return run


def doubtful(run: Run) -> str:
    return str(run.messages.filter(kind="orphan_found").values_list("call_id", flat=True)[0])


def card(run: Run, role: str = "superuser", status: int = 200) -> Page:
    response = browser(role).get(url(run, "call", doubtful(run)))
    assert response.status_code == status
    return read(response)


def last(run: Run, call_id: str) -> int:
    return int(run.messages.filter(call_id=call_id).order_by("-seq").values_list("seq", flat=True)[0])


def give(run: Run, verdict: str, role: str = "superuser", **changed: Any) -> Any:
    call_id = doubtful(run)
    data = {"seq": last(run, call_id), "verdict": verdict, "result": "", "evidence": EVIDENCE, **changed}
    return browser(role).post(url(run, "resolve", call_id), data, follow=True)


def payload(run: Run, kind: str, place: int = 0) -> dict[str, Any]:
    return list(run.messages.filter(kind=kind).order_by("seq").values_list("payload", flat=True))[place]


def finish(run: Run) -> Run:
    """Let a worker take the run up, and check its journal."""
    sweep()
    run.refresh_from_db()
    assert problems(run.session_id) == []
    return run


# What is on the card


def test_the_card_has_what_one_looks_up_in_the_outside_world(world: World, effects: Effects) -> None:
    run = held(call("post", text="later"))
    page = card(run)
    started = payload(run, "tool_started")
    for shown in (
        "wire(text='x')", "It may have happened zero or one times.", "exactly these arguments",
        started["key"], "Attempt1", "epoch 1", "nothing: it is not repeated by itself", "not limited",
        "nobody: no approval was needed", "The handler says that its outcome is unknown: no answer to x",
        "held for a person", "second", UNKNOWN.format(tool="wire"), AFTER_UNKNOWN, "post(text='later')",
        "The model is told exactly the result that you enter.", "as attempt 2, with the same key",
    ):  # fmt: skip
        assert shown.replace("second", "(") in page.text, shown
    order = ["wire(text='x')", "zero or one times", "exactly these arguments", started["key"], "It happened"]
    places = [page.text.index(text, page.text.index("zero or one") - 500) for text in order]
    assert places == sorted(places)
    assert url(run) in page.links
    assert f"{url(run)}?after={last(run, doubtful(run)) - 1}#row-{last(run, doubtful(run))}" in page.links
    assert set(page.forms) >= {url(run, "resolve", doubtful(run)), url(run, "cancel")}


def test_what_reconcile_said_stands_on_the_card(world: World) -> None:
    def ask(ctx: ToolContext, args: dict[str, Any]) -> Unknown:
        return Unknown("the bank is closed")

    @tool(reconcile=ask)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        raise MemoryError

    run = start({"tools": [call("pay")]}, tools=[pay])
    sweep()
    run.refresh_from_db()
    assert run.status == "orphaned"
    page = card(run)
    assert "reconcile does not know: the bank is closed" in page.text
    assert "reconcile: the outside system is asked by the key" in page.text
    assert "the outside system is asked" in page.text
    assert "each further call of pay" not in page.text


def test_a_call_that_was_approved_says_by_whom_and_has_its_title(world: World) -> None:
    @tool(requires_approval=True, describe=lambda args: f"Pay {args['cents']} cents")
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        raise MemoryError

    run = start({"tools": [call("pay", cents=7)]}, tools=[pay])
    approval = run.approvals.get()
    approve(approval.pk, user("decider"))
    finish(run)
    page = card(run)
    assert "Pay 7 cents" in page.text
    assert "decider, 20" in page.text
    assert url(approval) in page.links


def test_the_run_and_the_list_lead_to_the_card(world: World) -> None:
    run = held()
    target = url(run, "call", doubtful(run))
    page = read(browser("superuser").get(url(run)))
    assert target in page.links
    assert "Look in the outside world whether it happened, and say so on its card." in page.text
    listing = read(browser("superuser").get(reverse("admin:agentruns_run_changelist")))
    assert target in listing.links
    assert "A call of wire is in doubt" in listing.text


def test_the_card_costs_the_same_however_much_there_is(world: World) -> None:
    client = browser("superuser")

    def cost(run: Run) -> int:
        target = url(run, "call", doubtful(run))
        with CaptureQueriesContext(connection) as queries:
            assert client.get(target).status_code == 200
        return len(queries)

    turns = [{"tools": [call("post", text=str(number))]} for number in range(9)]
    later = [call("refund", cents=5000 + number) for number in range(5)]
    short = cost(held(session="short"))
    long = start(*turns, {"tools": [call("wire", text="x"), *later]}, session="long")
    assert long.status == "orphaned"
    assert cost(long) == short <= 12


def test_sensitive_arguments_are_shown_to_whom_may_see_them(world: World) -> None:
    @tool(sensitive=["token"])
    def charge_card(ctx: ToolContext, token: str, cents: int) -> str:
        """Charge."""
        raise MemoryError

    turn = {"tools": [call("charge_card", token="tok_42", cents=7), call("post", text="later")]}
    run = start(turn, tools=[charge_card])
    masked = card(run, "resolver")
    assert "tok_42" not in masked.text
    assert "charge_card(cents=7, token=***)" in masked.text
    assert "tok_42" in card(run, "superuser").text


def test_looking_changes_nothing(world: World) -> None:
    run, client = held(), browser("superuser")
    before = snapshot()
    for action in ("call", "resolve"):
        assert client.get(url(run, action, doubtful(run))).status_code in (200, 302)
        assert client.head(url(run, action, doubtful(run))).status_code in (200, 302)
    assert client.get(url(run, "resolve", doubtful(run))).url == url(run, "call", doubtful(run))
    assert snapshot() == before


@pytest.mark.parametrize("call_id", ["x", "018f0000-0000-7000-8000-000000000000", "a\x00b", "9" * 99, "'--"])
def test_a_call_that_is_not_there(world: World, call_id: str) -> None:
    run = held()
    for action in ("call", "resolve"):
        assert browser("superuser").post(url(run, action, call_id), {}).status_code == 404


def test_a_call_of_another_run_is_not_there(world: World) -> None:
    run, other = held(), held(session="s2")
    assert browser("superuser").get(url(other, "call", doubtful(run))).status_code == 404


# The verdicts


def test_it_happened_stores_the_result_and_nothing_happens_again(world: World, effects: Effects) -> None:
    run = held()
    page = read(give(run, "occurred", result='{"wire": 7}'))
    assert (
        "Recorded: it happened. The result is stored as a JSON object. A worker takes the run up."
        in page.text
    )
    verdict = payload(run, "orphan_resolved")
    assert (verdict["actor"]["name"], verdict["evidence"]) == ("superuser", EVIDENCE)
    assert finish(run).status == "completed"
    result = payload(run, "tool_result")
    assert (result["outcome"], result["content"], result["is_error"]) == ("ok", {"wire": 7}, False)
    assert effects.count() == 1
    logged = LogEntry.objects.get(object_id=str(run.pk)).change_message
    assert "wire: occurred." in logged
    assert EVIDENCE in logged
    page = card(run)
    assert "superuser said on" in page.text
    assert "that it happened." in page.text
    assert "Tool finished, on" in page.text
    assert url(run, "resolve", doubtful(run)) not in page.forms


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("[1, 2]", [1, 2]),
        ("12.5", 12.5),
        ("went out at noon\r\nsays Ann", "went out at noon\nsays Ann"),
        ("true", "true"),
        ("NaN", "NaN"),
        ('"quoted"', '"quoted"'),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
        ("<b>\u202e</b>", "<b>\u202e</b>"),
    ],
)
def test_what_is_typed_is_json_or_text(world: World, typed: str, stored: Any) -> None:
    run = held()
    assert give(run, "occurred", result=typed).status_code == 200
    assert payload(run, "tool_result")["content"] == stored


def test_it_did_not_happen_runs_it_once_more_with_the_same_key(world: World, effects: Effects) -> None:
    run = held()
    page = read(give(run, "not_occurred", "resolver"))
    assert "Recorded: it did not happen. A worker takes the run up." in page.text
    assert "A worker runs it again, with the same key." in card(run).text
    assert effects.count() == 1
    assert finish(run).status == "completed"
    assert [line["attempt"] for line in effects.lines()] == [1, 2]
    assert len({line["key"] for line in effects.lines()}) == 1
    assert payload(run, "tool_result")["content"] == "wired"
    assert payload(run, "orphan_resolved")["actor"]["name"] == "resolver"
    assert sweep().found == 0


def test_unknown_is_told_to_the_model_and_what_follows_is_not_run(world: World, effects: Effects) -> None:
    run = held(call("post", text="later"))
    assert read(give(run, "unknown", evidence="")).text.count("Recorded: unknown.") == 1
    assert finish(run).status == "completed"
    first, second = payload(run, "tool_result"), payload(run, "tool_result", 1)
    assert first["outcome"] == "unknown"
    assert UNKNOWN.format(tool="wire") in first["content"]
    assert (second["outcome"], second["content"]) == ("cancelled", AFTER_UNKNOWN)
    assert effects.count() == 1
    page = card(run)
    assert "superuser had its outcome told to the model as unknown" in page.text
    assert "Nobody has cleared it." in page.text
    assert "Its run has ended, and stays as it is." in page.text


def test_cancelling_from_the_card_ends_the_run(world: World, effects: Effects) -> None:
    run = held()
    assert url(run, "cancel") in card(run).forms
    browser("superuser").post(url(run, "cancel"), {"reason": "enough"})
    run.refresh_from_db()
    assert run.status == "cancelled"
    page = card(run)
    assert "Its outcome was recorded as unknown" in page.text
    assert url(run, "cancel") not in page.forms
    assert effects.count() == 1


def test_a_paused_run_stays_paused_and_says_so(world: World, effects: Effects) -> None:
    from agentruns import pause_run

    run = held()
    pause_run(run.pk, None, reason="audit")
    assert "The run stays paused until somebody resumes it." in card(run).text
    page = read(give(run, "occurred", result="sent"))
    assert "Recorded: it happened. The result is stored as text." in page.text
    assert "is stored as text. A worker takes" not in page.text
    assert finish(run).status == "paused"


# A call that the model was told of already


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred"])
def test_a_verdict_after_the_end_only_records_and_lifts_the_doubt(
    world: World, effects: Effects, verdict: str
) -> None:
    run = told()
    assert "nothing is run, and what the model was told stays" in card(run).text
    shown = read(browser("superuser").get(url(run)))
    assert "A call of wire was told to the model as unknown; nobody has cleared it." in shown.text
    assert "Until then each further call of wire asks a person." in shown.text
    assert url(run, "call", doubtful(run)) in shown.links
    rows = run.messages.count()
    page = read(give(run, verdict))
    assert "The doubt is lifted." in page.text
    assert "nobody has cleared it" not in page.text
    assert run.messages.count() == rows + 1
    assert finish(run).status == "completed"
    assert effects.count() == 1
    page = card(run)
    assert "The doubt is lifted." in page.text
    assert url(run, "resolve", doubtful(run)) not in page.forms
    again = start({"tools": [call("wire", text="y")]}, key="again")
    assert (again.approvals.count(), effects.count()) == (0, 2)


def test_still_unknown_keeps_a_note_and_the_doubt(world: World, effects: Effects) -> None:
    run = told()
    assert give(run, "unknown", evidence="").status_code == 400
    page = read(give(run, "unknown", evidence="the bank does not know either"))
    assert "Recorded: unknown. The doubt stays." in page.text
    page = card(run)
    assert "that it is unknown. Nobody has cleared it." in page.text
    assert "the bank does not know either" in page.text
    assert "lifted" in read(give(run, "occurred")).text


def test_a_doubt_of_an_earlier_run_stands_on_the_later_one(world: World, effects: Effects) -> None:
    first = told()
    second = start({"tools": [call("post", text="hi")]}, key="second")
    assert second.pk != first.pk
    page = read(browser("superuser").get(url(second)))
    assert "A call of wire was told to the model as unknown" in page.text
    assert url(first, "call", doubtful(first)) in page.links
    give(first, "occurred")
    assert "was told to the model" not in read(browser("superuser").get(url(second))).text


# What came too late to be a result


class Late:
    """A tool whose handler returns after its time, or after its worker lost the run."""

    def __init__(self, returns: Any, timeout: float | None = None) -> None:
        self.go, self.entered, self.returns = threading.Event(), threading.Event(), returns
        self.tool = tool(name="slow", timeout=timeout)(self.slow)

    def slow(self, ctx: ToolContext) -> Any:
        """Take long."""
        Effects.from_environment().record(ctx.idempotency_key)
        self.entered.set()
        assert self.go.wait(60)
        if isinstance(self.returns, Exception):
            raise self.returns
        return self.returns

    def report(self) -> None:
        self.go.set()
        wait_for(lambda: Message.objects.filter(kind="late_result").exists(), "the late result")


def timed_out(returns: Any) -> tuple[Run, Late]:
    late = Late(returns, timeout=0.05)
    run = start({"tools": [call("slow")]}, tools=[late.tool])
    assert run.status == "orphaned"
    return run, late


def test_what_a_zombie_returned_is_evidence(world: World, effects: Effects) -> None:
    late = Late({"sent": [1, 2]})
    agent = shop_agent("late", {"tools": [call("slow")]}, tools=[late.tool])

    def drive() -> None:
        try:
            run_agent(agent, "do it", "s1", idempotency_key="k")
        except Exception:  # its lease is lost, as it should be
            pass
        finally:
            connections.close_all()

    worker = threading.Thread(target=drive, daemon=True)
    worker.start()
    assert late.entered.wait(60)
    run = Run.objects.get()
    kill(run)
    finish(run)
    assert run.status == "orphaned"
    assert url(run, "resolve", doubtful(run)) in card(run).forms
    late.report()
    worker.join(60)
    page = card(run)
    assert (
        "Its handler returned after its worker had lost the run. This is evidence that it happened:"
        in page.text
    )
    assert page.text.count('{"sent": [1, 2]}') == 2
    assert "stored exactly so, as a JSON object" in page.text
    assert page.disabled == ["ar-why-2"]
    assert "Its handler returned without an error, so it did happen." in page.text
    before = snapshot()
    response = give(run, "not_occurred")
    assert response.status_code == 409
    assert "so it did happen" in read(response).text
    assert snapshot() == before
    give(run, "occurred", result='{"sent": [1, 2]}')
    assert finish(run).status == "completed"
    assert payload(run, "tool_result")["content"] == {"sent": [1, 2]}
    assert effects.count() == 1


@pytest.mark.parametrize("returns", ["42", "null", None, True, "a\u202eb\nc", "", [1.5, "x" * 200]])
def test_what_is_left_as_it_was_filled_in_is_stored_exactly(
    world: World, effects: Effects, returns: Any
) -> None:
    run, late = timed_out(returns)
    late.report()
    page = card(run)
    assert "Its handler returned after its time was over." in page.text
    data = textarea(run, "result")
    assert give(run, "occurred", result=data).status_code == 200
    stored = payload(run, "tool_result")["content"]
    assert (stored, type(stored)) == (returns, type(returns))


def textarea(run: Run, name: str) -> str:
    html = browser("superuser").get(url(run, "call", doubtful(run))).content.decode()
    inside = html.split(f'<textarea name="{name}"')[1].split("</textarea>")[0].partition(">")[2]
    import html as entities

    return entities.unescape(inside.removeprefix("\n")).replace("\n", "\r\n")


def test_an_error_that_came_late_is_shown_and_forbids_nothing(world: World, effects: Effects) -> None:
    run, late = timed_out(ValueError("no money"))
    late.report()
    page = card(run)
    assert "Its handler raised an error, too late to count. It may have happened all the same." in page.text
    assert "no money" in page.text
    assert page.disabled == []
    assert give(run, "not_occurred").status_code == 200


def test_a_report_that_comes_in_while_one_decides_is_seen_first(world: World, effects: Effects) -> None:
    run, late = timed_out("sent")
    seen = last(run, doubtful(run))
    late.report()
    before = snapshot()
    response = give(run, "not_occurred", seq=seen)
    assert response.status_code == 409
    page = read(response)
    assert "The call moved on since you looked." in page.text
    assert "Its handler returned after its time was over." in page.text
    assert textarea(run, "result") == "sent"
    assert snapshot() == before


def test_it_is_not_run_again_before_its_time_is_over(world: World, effects: Effects) -> None:
    late = Late("sent", timeout=900)
    agent = shop_agent("late", {"tools": [call("slow")]}, tools=[late.tool])

    def drive() -> None:
        try:
            run_agent(agent, "do it", "s1", idempotency_key="k")
        except Exception:  # its lease is lost, as it should be
            pass
        finally:
            connections.close_all()

    worker = threading.Thread(target=drive, daemon=True)
    worker.start()
    assert late.entered.wait(60)
    run = Run.objects.get()
    kill(run)
    finish(run)
    page = card(run)
    assert "with the same key, not before 20" in page.text
    assert "in 14\xa0minutes), when the time of this attempt is over" in page.text
    give(run, "not_occurred")
    finish(run)
    assert (run.status, effects.count()) == ("queued", 1)
    assert run.not_before is not None
    late.go.set()
    worker.join(60)


# Who comes too late, twice, or without a word


def test_two_people_at_once_are_one_verdict(world: World, effects: Effects) -> None:
    run = held()
    target, seen = url(run, "resolve", doubtful(run)), last(run, doubtful(run))
    clients = {"occurred": browser("resolver"), "not_occurred": browser("superuser")}
    start, answers = threading.Barrier(2), {}

    def click(verdict: str) -> None:
        try:
            start.wait()
            data = {"seq": seen, "verdict": verdict, "result": "sent", "evidence": EVIDENCE}
            answers[verdict] = clients[verdict].post(target, data)
        finally:
            connection.close()

    threads = [threading.Thread(target=click, args=[verdict]) for verdict in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers.values()) == [302, 409]
    won = next(verdict for verdict, answer in answers.items() if answer.status_code == 302)
    lost = next(answer for answer in answers.values() if answer.status_code == 409)
    assert payload(run, "orphan_resolved")["verdict"] == won
    assert run.messages.filter(kind="orphan_resolved").count() == 1
    name = {"occurred": "resolver", "not_occurred": "superuser"}[won]
    assert f"Your verdict was not recorded. {name} said on 20" in read(lost).text
    assert finish(run).status == "completed"
    assert effects.count() == {"occurred": 1, "not_occurred": 2}[won]


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred", "unknown"])
@pytest.mark.parametrize("driven", [False, True])
def test_a_double_click_is_told_that_it_is_done(
    world: World, effects: Effects, verdict: str, driven: bool
) -> None:
    run = held()
    seen = last(run, doubtful(run))
    give(run, verdict, seq=seen, result='{"a": 1}')
    if driven:
        finish(run)
    before = snapshot()
    response = give(run, verdict, seq=seen, result='{"a": 1}')
    assert response.status_code == 200
    assert "Your verdict was recorded already. superuser said on" in read(response).text
    assert snapshot() == before
    for other in ({"evidence": "another"}, {"verdict": "unknown" if verdict != "unknown" else "occurred"}):
        changed = {"seq": seen, "result": '{"a": 1}', **other}
        response = give(run, changed.pop("verdict", verdict), **changed)
        assert response.status_code == 409
        assert "Your verdict was not recorded. superuser said on" in read(response).text
    if verdict == "occurred":
        assert give(run, verdict, seq=seen, result="other").status_code == 409
    assert give(run, verdict, "resolver", seq=seen, result='{"a": 1}').status_code == 409
    assert snapshot() == before
    assert LogEntry.objects.count() == 1


def test_somebody_resumed_or_cancelled_meanwhile(world: World, effects: Effects) -> None:
    first, second = held(), held(session="s2")
    seen = {run.pk: last(run, doubtful(run)) for run in (first, second)}
    resume_run(first.pk, user("superuser"))
    cancel_run(second.pk, user("superuser"))
    for run in (first, second):
        before = snapshot()
        response = give(run, "not_occurred", "resolver", seq=seen[run.pk])
        assert response.status_code == 409
        assert "The call moved on since you looked." in read(response).text
        assert snapshot() == before


@pytest.mark.parametrize("seen", [0, -1, "", "x", "٣", 10**30])
def test_a_page_that_is_out_of_date_decides_nothing(world: World, seen: object) -> None:
    run, before = held(), snapshot()
    response = give(run, "occurred", seq=seen, result="sent")
    assert response.status_code == 409
    assert "The call moved on since you looked." in read(response).text
    assert snapshot() == before


@pytest.mark.parametrize(
    ("verdict", "changed", "said"),
    [
        ("occurred", {"evidence": " \n", "result": "sent"}, "Say how you know it"),
        ("not_occurred", {"evidence": ""}, "Say how you know it"),
        ("occurred", {"result": " "}, "Say what the tool is to have returned"),
        ("not_occurred", {"evidence": "x" * 2001}, "at most 2000 characters"),
        ("occurred", {"result": "x" * 100_001}, "at most 100000 characters"),
        ("occurred", {"result": "a\x00b"}, "Null characters are not allowed"),
        ("maybe", {}, "Nothing was decided"),
        ("", {}, "Nothing was decided"),
    ],
)
def test_what_is_missing_is_said_and_what_was_typed_is_kept(
    world: World, verdict: str, changed: dict[str, str], said: str
) -> None:
    run, before = held(), snapshot()
    typed = {"evidence": "I asked Ann", "result": "sent", **changed}
    response = give(run, verdict, **typed)
    assert response.status_code == 400
    html = response.content.decode()
    assert said in html
    kept = [text for text in typed.values() if text.strip() and "\x00" not in text]
    assert verdict != "occurred" or all(escape(text) in html for text in kept)
    assert snapshot() == before


def test_a_call_that_is_not_in_doubt_is_shown_and_not_decided(world: World, effects: Effects) -> None:
    run = world.completed()
    call_id = payload(run, "assistant")["calls"][0]["id"]
    page = read(browser("superuser").get(url(run, "call", call_id)))
    assert "Tool finished, on" in page.text
    assert "zero or one times" not in page.text
    before = snapshot()
    data = {"seq": last(run, call_id), "verdict": "not_occurred", "evidence": EVIDENCE}
    response = browser("superuser").post(url(run, "resolve", call_id), data)
    assert response.status_code == 409
    assert "is not in doubt; there is nothing to decide." in read(response).text
    assert snapshot() == before


def test_a_call_that_waits_for_approval_has_a_page_too(world: World) -> None:
    approval = world.waiting()
    page = read(browser("superuser").get(url(approval.run, "call", approval.call_id)))
    assert "It has not been started." in page.text
    assert url(approval) in page.links


# Who may


@pytest.mark.parametrize("role", ROLES)
def test_roles(world: World, effects: Effects, role: str) -> None:
    run, client = held(), browser(role)
    sees = role in ("viewer", "operator", "resolver", "superuser")
    may = role in ("resolver", "superuser")
    before = snapshot()
    response = client.get(url(run, "call", doubtful(run)))
    target = url(run, "resolve", doubtful(run))
    if role in ("anonymous", "outsider"):
        assert response.url.startswith(reverse("admin:login"))
    else:
        assert response.status_code == (200 if sees else 403)
    if sees:
        page = read(response)
        assert (target in page.forms) == may
        assert ("You lack the permission agentruns.resolve_orphan." in page.text) == (not may)
    data = {"seq": last(run, doubtful(run)), "verdict": "occurred", "result": "sent", "evidence": EVIDENCE}
    response = client.post(target, data)
    expected = 302 if may or role in ("anonymous", "outsider") else 403
    assert response.status_code == expected
    if may:
        assert response.url == url(run)
        assert payload(run, "orphan_resolved")["actor"]["name"] == role
    else:
        assert snapshot() == before


def test_a_verdict_needs_the_token_of_the_page(world: World, effects: Effects) -> None:
    run, client = held(), browser("superuser", enforce_csrf_checks=True)
    target, before = url(run, "resolve", doubtful(run)), snapshot()
    form = read(client.get(url(run, "call", doubtful(run)))).forms[target]
    data = {**form, "verdict": "occurred", "result": "sent", "evidence": EVIDENCE}
    token = data.pop("csrfmiddlewaretoken")
    assert client.post(target, data).status_code == 403
    assert snapshot() == before
    assert client.post(target, {**data, "csrfmiddlewaretoken": token}).status_code == 302


# Hostile text


@pytest.mark.parametrize("name", list(HOSTILE))
def test_every_field_of_the_card(world: World, effects: Effects, name: str) -> None:
    text = HOSTILE[name]
    late = Late({"wrote": text, text: text}, timeout=0.05)
    turn = {"tools": [call("wire", text=text), call("post", text=text)]}
    run = start(turn, tools=[late.tool], session="hostile")
    assert run.status == "orphaned"
    page = card(run)
    assert not [link for link in page.links if "evil" in link or "javascript" in link]
    if text.isprintable():
        assert page.text.count(text) >= 2
    typed = text.encode(errors="replace").replace(b"\x00", b"").decode()
    give(run, "not_occurred", evidence=typed)
    page = card(run)
    finish(run)
    if typed.isprintable():
        assert typed in page.text
    other, late = timed_out_with(text)
    late.report()
    for shown in (card(other), card(run), read(browser("superuser").get(url(run)))):
        assert not {"object", "iframe", "base", "embed"} & set(shown.tags)
        assert not [link for link in shown.links if "evil" in link or "javascript" in link]
    if text.isprintable():
        assert escape(text) in browser("superuser").get(url(other, "call", doubtful(other))).content.decode()


def timed_out_with(text: str) -> tuple[Run, Late]:
    return timed_out(text)


def test_the_projects_own_redaction_holds_on_the_card(world: World, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = "tests.admin.test_orphans.without_numbers"
    run, late = timed_out("card 4111 was charged")
    late.report()
    html = browser("superuser").get(url(run, "call", doubtful(run))).content.decode()
    assert "4111" not in html
    assert "card [number] was charged" in html
    response = give(run, "occurred", result="card [number] was not charged")
    assert response.status_code == 400
    assert "Part of it is hidden here." in read(response).text
    give(run, "occurred", result="card [number] was charged")
    assert payload(run, "tool_result")["content"] == "card 4111 was charged"
    assert Approval.objects.count() == 0


def without_numbers(text: str) -> str:
    return text.replace("4111", "[number]")
