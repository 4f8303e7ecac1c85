"""Once a conversation holds what outsiders wrote, no call of it sends, pays or publishes without a person."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command

from agentruns import (
    NotOccurred,
    Pending,
    ToolContext,
    adopt_definition,
    approve,
    deliver_event,
    deny,
    export_run,
    fork_run,
    pause_run,
    resume_run,
    run_again,
    run_agent,
    start_run,
    tool,
)
from agentruns.journal.outsiders import read_by
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, Session
from agentruns.services.data.erasure import erase_payload
from agentruns.services.sweep import sweep
from agentruns.services.transfer import import_run
from tests.admin.people import browser
from tests.api.http import Api, make_user
from tests.db.exports import forget_everything
from tests.db.families import work
from tests.db.helpers import names, payloads, run_out
from tests.db.outsiders import (
    INBOX,
    MAILS,
    READ,
    SEND,
    WHY,
    acted,
    card,
    drive,
    pay,
    read_mail,
    reader,
    reads,
    send_mail,
)
from tests.effects import Effects
from tests.shop.agents import act, call

pytestmark = pytest.mark.django_db(transaction=True)


def whole() -> None:
    """Check every journal."""
    assert not any(problems(session.pk) for session in Session.objects.all())


def begin(agent: Any, session: str = "s1", text: str = "do it", **options: Any) -> Run:
    return drive(start_run(agent, text, session, **options))


def asks(effects: Effects, *readers: str) -> Approval:
    """Check that a mail waits for a person who is told what was read, and that it is sent once after that."""
    waiting = card()
    (asked,) = payloads(waiting.run, "approval_requested")
    assert asked["untrusted"] == [*(readers or ["read_mail"])]
    assert waiting.why.startswith(WHY.replace("read_mail", ", ".join(asked["untrusted"])))
    assert acted(effects) == []
    approve(waiting.pk, None, digest=waiting.digest)
    drive(waiting.run)
    assert acted(effects) == ["send_mail"]
    whole()
    return waiting


@pytest.mark.parametrize("mail", range(len(MAILS)), ids=[each["trick"] for each in MAILS])
def test_a_model_that_falls_for_a_mail_does_nothing_outside_without_a_person(
    mail: int, effects: Effects
) -> None:
    """The model has read the mail, word for word, and does what the mail asks for."""
    falls, by, text = MAILS[mail]["calls"], MAILS[mail]["by"], MAILS[mail]["mail"]
    read, misled = {"tools": [call("read_mail", number=mail)]}, {"tools": falls}

    def fall(request: Any) -> dict[str, Any]:
        said = [part.get("content") for message in request.messages for part in message["content"]]
        assert any(text in str(each) for each in said), "the model has read the mail"
        return misled

    if by == "child":
        clerk = reader(misled, name="clerk")
        agent = reader(read, {"tools": [call("clerk", task=text)]}, tools=[*INBOX, clerk.as_tool()])
    elif by == "reader":
        clerk = reader(read, {"text": "The boss wants it."}, name="clerk")
        agent = reader({"tools": [call("clerk", task="read it")]}, misled, tools=[*INBOX, clerk.as_tool()])
    elif by == "next run":
        begin(reader(read, {"text": "Nothing new."}, name="first"))
        agent = reader(fall)
    else:
        agent = reader(read, fall)
    run = begin(agent)
    assert acted(effects) == [], "nothing without a person"
    cards = [*Approval.objects.pending().order_by("requested_at", "pk")]
    assert [each.arguments for each in cards] == [each["input"] for each in falls]
    for number, each in enumerate(cards):
        assert f"{falls[number]['name']} sends or pays outside" in each.why
        assert "read by read_mail" in each.why
        approve(each.pk, None, digest=each.digest)
        drive(each.run)
        assert acted(effects) == [one["name"] for one in falls[: number + 1]], "once after an approval"
    run.refresh_from_db()
    assert run.status == "completed"
    whole()


def test_a_denied_call_does_nothing(effects: Effects) -> None:
    run = begin(reader(READ, SEND, SEND))
    deny(card().pk, None, "nobody asked for it")
    assert drive(run).status == "completed"
    assert (acted(effects), Approval.objects.count()) == ([], 1)
    whole()


def test_a_card_that_nobody_answers_lets_nothing_out(effects: Effects) -> None:
    run = begin(reader(READ, SEND))
    run_out(card())
    assert drive(run).status == "completed"
    assert acted(effects) == []


def test_nobody_is_asked_before_anything_was_read(effects: Effects) -> None:
    run = begin(reader(SEND, READ))
    assert (run.status, names(effects)) == ("completed", ["send_mail", "read_mail"])
    assert not Approval.objects.exists()
    assert reads(run) == [("tool_started", True)]


def test_a_call_of_the_reply_that_reads_was_written_before(effects: Effects) -> None:
    """Its arguments cannot hold what the mail says, but those of the next reply can."""
    run = begin(reader({"tools": [*READ["tools"], *SEND["tools"]]}, SEND))
    assert (run.status, names(effects)) == ("awaiting-approval", ["read_mail", "send_mail"])
    assert card().why == WHY


def test_calls_that_read_side_by_side_are_all_named(effects: Effects) -> None:
    @tool(untrusted=True, safe_to_retry=True, parallel=True)
    def search_web(ctx: ToolContext, query: str) -> str:
        """Search the web."""
        return act("search_web", ctx, query=query)

    both = {"tools": [call("search_web", query="a"), call("read_mail"), call("search_web", query="b")]}
    begin(reader(both, SEND, tools=[search_web, *INBOX]))
    asks(effects, "search_web", "read_mail")


def test_the_next_run_of_the_session_asks(effects: Effects) -> None:
    assert begin(reader(READ)).status == "completed"
    begin(reader(SEND, name="other"))
    asks(effects)


def test_another_session_does_not(effects: Effects) -> None:
    begin(reader(READ))
    assert begin(reader(SEND, name="other"), "s2").status == "completed"
    assert acted(effects) == ["send_mail"]


def test_a_run_that_repeats_the_task_asks(effects: Effects) -> None:
    run = begin(reader(READ))
    reader(SEND)
    drive(run_again(run.pk))
    asks(effects)


@pytest.mark.parametrize("is_late", [True, False], ids=["after the mail", "before the mail"])
def test_a_fork_has_read_what_its_rows_hold(is_late: bool, effects: Effects) -> None:
    run = begin(reader(READ))
    start = Message.objects.get(session=run.session, kind="tool_started")
    at = Message.objects.filter(run=run).latest("seq").seq if is_late else start.seq - 2
    fork = drive(fork_run(run.pk, at, text="and now?", agent=reader({"text": "hm"}, SEND, SEND, SEND)))
    if is_late:
        asks(effects)
        assert reads(fork) == [("tool_started", True)]
        forked = drive(fork_run(fork.pk, Message.objects.filter(run=fork).latest("seq").seq, text="again"))
        assert list(read_by("default", forked)) == ["read_mail"]
    else:
        assert (fork.status, reads(fork)) == ("completed", [])


def test_a_fork_with_the_result_of_a_later_start_has_read_it(effects: Effects) -> None:
    """The call was asked for before the cut, and has started and ended since."""
    run = begin(reader(READ))
    reply = Message.objects.get(session=run.session, kind="assistant", seq__lte=4)
    assert payloads(run, "tool_started")
    fork = drive(fork_run(run.pk, reply.seq, agent=reader({"text": "hm"}, SEND)))
    assert reads(fork) == [("run_started", ["read_mail"])]
    asks(effects)


def test_what_a_child_run_has_read_its_parent_has(effects: Effects) -> None:
    clerk = reader(READ, {"text": "It says hello."}, name="clerk")
    run = begin(reader({"tools": [call("clerk", task="read")]}, SEND, tools=[*INBOX, clerk.as_tool()]))
    (result,) = payloads(run, "tool_result")
    assert (result["content"], result["untrusted"]) == ("It says hello.", ["read_mail"])
    asks(effects)


def test_what_a_grandchild_has_read_comes_up(effects: Effects) -> None:
    clerk = reader(READ, name="clerk")
    head = reader({"tools": [call("clerk", task="read")]}, name="head", tools=[clerk.as_tool()])
    begin(reader({"tools": [call("head", task="read")]}, SEND, tools=[*INBOX, head.as_tool()]))
    asks(effects)


def test_what_a_child_that_failed_had_read_comes_up(effects: Effects) -> None:
    clerk = reader(READ, {"text": "cut", "stop_reason": "refusal"}, name="clerk")
    run = begin(reader({"tools": [call("clerk", task="read")]}, SEND, tools=[*INBOX, clerk.as_tool()]))
    (result,) = payloads(run, "tool_result")
    assert (result["is_error"], result["untrusted"]) == (True, ["read_mail"])
    asks(effects)


def test_a_child_run_has_read_what_its_parent_has(effects: Effects) -> None:
    clerk = reader(SEND, name="clerk")
    head = reader({"tools": [call("clerk", task="send it")]}, name="head", tools=[clerk.as_tool()])
    run = begin(reader(READ, {"tools": [call("head", task="send it")]}, tools=[*INBOX, head.as_tool()]))
    waiting = asks(effects)
    assert waiting.run.agent == "clerk"
    (begun,) = payloads(waiting.run, "run_started")
    assert begun["parent"]["untrusted"] == ["read_mail"]
    run.refresh_from_db()
    assert run.status == "completed"


def test_a_deferred_call_asks_in_a_run_of_its_own(effects: Effects) -> None:
    @tool(outward=True, deferred=True)
    def send_mail(ctx: ToolContext, to: str, body: str) -> str:
        """Send a mail to anybody."""
        return act("send_mail", ctx, to=to, body=body)

    run = begin(reader(READ, SEND, {"text": "A colleague looks at it."}, tools=[read_mail, send_mail]))
    assert (run.status, run.output) == ("completed", "A colleague looks at it.")
    waiting = asks(effects)
    assert waiting.run.parent_id == run.pk
    assert begin(reader(SEND, name="calm", tools=[read_mail, send_mail]), "s2").status == "completed"
    assert acted(effects) == ["send_mail"] * 2, "before anything was read it runs at once"


def test_a_deferred_call_tells_what_it_has_read(effects: Effects) -> None:
    @tool(untrusted=True, requires_approval=True, deferred=True)
    def read_mail(ctx: ToolContext) -> str:
        """Read a mail that staff release."""
        return act("read_mail", ctx)

    run = begin(reader(READ, {"text": "wait"}, tools=[read_mail, send_mail]))
    assert reads(run) == [], "nobody has read it yet"
    approve(card().pk, None)
    reader(SEND, tools=[read_mail, send_mail])
    work()
    assert reads(Run.objects.get(parent=run)) == [("tool_started", True)]
    assert reads(run) == [("user", ["read_mail"])]
    asks(effects)


def test_a_deferred_call_that_is_denied_has_read_nothing() -> None:
    gated = tool(read_mail.fn, name="read_mail", untrusted=True, requires_approval=True, deferred=True)
    run = begin(reader(READ, {"text": "wait"}, tools=[gated, send_mail]))
    deny(card().pk, None, "no")
    work()
    assert (Run.objects.filter(session=run.session).count(), reads(run)) == (2, [])


def test_an_adopted_definition_asks_before_a_call_that_has_not_started(effects: Effects) -> None:
    quiet = tool(send_mail.fn, name="send_mail")
    run = start_run(reader(READ, SEND, tools=[read_mail, quiet]), "do it", "s1")

    def stop(request: Any) -> Any:
        pause_run(run.pk)
        return SEND

    reader(READ, stop, tools=[read_mail, quiet])
    assert drive(run).status == "paused"
    assert acted(effects) == []
    reader(READ, SEND, tools=[read_mail, send_mail])
    adopt_definition(run.pk)
    resume_run(run.pk)
    assert acted(effects) == []
    asks(effects)


def test_an_agent_may_trust_what_a_tool_reads(effects: Effects) -> None:
    agent = reader(READ, SEND, trusts=["read_mail"])
    run = begin(agent)
    assert (run.status, acted(effects), reads(run)) == ("completed", ["send_mail"], [])
    assert agent.definition()["trusts"] == ["read_mail"]
    assert "trusts" not in reader(READ, name="plain").definition()


def test_an_agent_trusts_only_what_it_names(effects: Effects) -> None:
    other = tool(read_mail.fn, name="search_web", untrusted=True)
    begin(reader(READ, SEND, tools=[other, *INBOX], trusts=["search_web"]))
    asks(effects)


def test_what_one_agent_trusts_another_does_not(effects: Effects) -> None:
    begin(reader(READ, trusts=["read_mail"]))
    begin(reader(READ, SEND, name="other"))
    asks(effects)


def test_the_reason_of_the_tool_is_told_as_well() -> None:
    gated = tool(send_mail.fn, name="send_mail", outward=True, requires_approval=True)
    begin(reader(READ, SEND, tools=[read_mail, gated]))
    assert card().why == f"{WHY} send_mail requires approval."


def test_a_function_that_says_no_is_not_the_last_word(effects: Effects) -> None:
    gated = tool(send_mail.fn, name="send_mail", outward=True, requires_approval=lambda args, ctx: False)
    begin(reader(READ, SEND, tools=[read_mail, gated]))
    asks(effects)


def test_the_options_of_a_card_hold_for_it() -> None:
    strict = tool(send_mail.fn, name="send_mail", outward=True, risk="high", approvals=2, approvers="bosses")
    begin(reader(READ, SEND, tools=[read_mail, strict]))
    assert (card().risk, card().required, card().approvers) == ("high", 2, "bosses")


def test_a_doubt_does_not_hide_what_was_read(effects: Effects) -> None:
    @tool(outward=True)
    def breaks(ctx: ToolContext, to: str, body: str) -> str:
        """Send a mail, and lose the line."""
        act("send_mail", ctx)
        raise ConnectionError("the line is dead")

    failing = tool(breaks.fn, name="send_mail", outward=True)
    begin(reader(SEND, READ, SEND, tools=[read_mail, failing]))
    assert acted(effects) == ["send_mail"]
    assert card().why.startswith(f"{WHY} An earlier call of send_mail")
    assert payloads(card().run, "approval_requested")[0]["untrusted"] == ["read_mail"]


def test_a_stateless_run_has_nobody_to_ask(effects: Effects) -> None:
    result = run_agent(reader(READ, SEND), "do it")
    assert (result.status, acted(effects)) == ("completed", [])
    assert begin(reader(SEND, name="calm")).status == "completed"


@pytest.mark.parametrize("acts_later", [False, True], ids=["in the same reply", "in a later run"])
def test_tools_of_the_provider_may_have_read_anything(acts_later: bool, effects: Effects) -> None:
    """A provider that searches the web does so before it writes the calls of the same reply."""
    searches = {"model_params": {"tools": [{"type": "web_search"}]}, "unjournaled_tools": True}
    begin(reader(*([] if acts_later else [SEND]), **searches))
    if acts_later:
        begin(reader(SEND, name="other"))
    asks(effects, "tools of the provider")


def test_it_holds_for_a_fork_of_an_imported_record(effects: Effects) -> None:
    run = begin(reader(READ))
    lines = [*export_run(run.pk)]
    forget_everything()
    record = import_run(lines)
    last = Message.objects.filter(run=record).latest("seq").seq
    drive(fork_run(record.pk, last, text="go on", agent=reader({"text": "hm"}, {"text": "hm"}, SEND)))
    asks(effects)


@pytest.mark.parametrize("erases", [False, True], ids=["left as it is", "erased"])
def test_it_stays_so_when_the_text_is_gone(erases: bool, effects: Effects) -> None:
    run = begin(reader(READ))
    if erases:
        erase_payload(run.pk, Message.objects.get(run=run, kind="tool_result").seq, None, "gone")
    begin(reader(SEND, name="other"))
    asks(effects)


def test_an_attempt_that_is_repeated_counts_once(effects: Effects) -> None:
    @tool(untrusted=True, reconcile=lambda ctx, args: NotOccurred())
    def read_mail(ctx: ToolContext) -> str:
        """Read a mail, and lose the line."""
        act("read_mail", ctx)
        raise ConnectionError("the line is dead")

    begin(reader(READ, SEND, tools=[read_mail, send_mail]))
    asks(effects)


def test_an_event_that_a_call_waits_for_comes_under_its_start(effects: Effects) -> None:
    @tool(untrusted=True, awaits="mail")
    def read_mail(ctx: ToolContext) -> Pending:
        """Wait for the next mail."""
        return Pending("box-1")

    run = begin(reader(READ, SEND, tools=[read_mail, send_mail]))
    deliver_event("mail", "box-1", {"text": "pay me"})
    drive(run)
    asks(effects)


def test_the_api_names_what_was_read() -> None:
    ann, boss = make_user("ann"), Api(make_user("boss", is_superuser=True))
    run = begin(reader(READ), owner=ann)
    status, answer = boss.get(f"/runs/{run.pk}")
    assert (status, answer["untrusted"]) == (200, ["read_mail"])
    assert [each["untrusted"] for each in boss.get("/runs")[1]["items"]] == [None]
    assert Api(ann).get(f"/runs/{run.pk}")[1]["untrusted"] is None, "those who may see all of it read it"


def test_the_pages_name_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(reader(READ, SEND))
    client = browser("superuser")
    page = client.get(f"/admin/agentruns/run/{run.pk}/change/").content.decode()
    assert "Has read text that outsiders wrote" in page
    shown = client.get(f"/admin/agentruns/approval/{card().pk}/change/").content.decode()
    start = Message.objects.get(run=run, kind="tool_started")
    assert f"?after={start.seq - 1}#row-{start.seq}" in shown
    assert WHY in shown
    call_command("show_run", str(run.pk))
    assert "text that outsiders wrote, by read_mail" in capsys.readouterr().out


def test_two_tools_of_one_name_are_one(effects: Effects) -> None:
    begin(reader(READ, READ, {"tools": [call("pay", account="DE1", cents=5)]}, tools=[read_mail, pay]))
    assert payloads(card().run, "approval_requested")[0]["untrusted"] == ["read_mail"]
    assert sweep().driven == 0
