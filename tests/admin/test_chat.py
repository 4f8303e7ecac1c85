"""The conversation of a run: readable as people talk, honest about what ran twice, and gone on with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import approve, run_agent
from agentruns.admin.runs.chat import Talk
from agentruns.engine.leases import claim
from agentruns.journal.masking import NOTHING
from agentruns.journal.read import run_rows
from agentruns.models import Draft, Run
from agentruns.services.control import resolve_orphan
from agentruns.services.forks import fork_run
from agentruns.services.sweep import sweep
from agentruns.tools import tool
from tests.admin.pages import page, read, snapshot, text, url
from tests.admin.people import browser, user
from tests.admin.world import World, secretive
from tests.shop.agents import call, shop_agent
from tests.waiting import Hanging

pytestmark = pytest.mark.django_db(transaction=True)
TWICE = "ran 2 times with equal arguments"


def ran(name: str, *turns: Any, session: str = "s1", **options: Any) -> Run:
    return Run.objects.get(
        pk=run_agent(shop_agent(name, *turns, **options), f"task of {name}", session).run_id
    )


@tool(describe=lambda args: f"Mail to {args['to']}")
def send_mail(to: str, body: str) -> str:
    """Send a mail."""
    return "sent"


@tool
def refuses(cents: int) -> str:
    """Refuse."""
    raise ValueError("nothing was paid")


def test_equal_calls_of_a_session_are_said_in_red_with_their_rows() -> None:
    first = ran("once", {"tools": [call("post", text="hello"), call("lookup", number="A1")]})
    assert TWICE not in text(first)
    assert "No effect of this session ran twice with equal arguments." in text(first)
    second = ran("again", {"tools": [call("post", text="hello"), call("lookup", number="A1")]})
    starts = [
        (row.run_id, row.seq)
        for row in first.session.messages.filter(kind="tool_started", tool_name="post").order_by("seq")
    ]
    for run in (first, second):
        shown = page(run)
        assert f"post {TWICE}" in shown.text
        assert f"lookup {TWICE}" not in shown.text, "it may be repeated"
        assert "ran twice with equal arguments" not in shown.text
        for key, seq in starts:
            assert f"/admin/agentruns/run/{key}/at/?seq={seq}" in shown.links
    assert TWICE not in text(ran("other", {"tools": [call("post", text="another")]}))
    assert TWICE not in text(ran("elsewhere", {"tools": [call("post", text="hello")]}, session="s2"))


def approved(world: World, session: str, **options: Any) -> Run:
    approval = world.waiting(session, **options)
    approve(approval.pk, user("superuser"))
    sweep()
    approval.run.refresh_from_db()
    assert approval.run.status == "completed"
    return approval.run


def test_the_same_approved_call_in_another_session_is_said_in_red_on_both_pages(world: World) -> None:
    words = "refund(cents=5000): This exact call was approved and started in another session,"
    first = approved(world, "a")
    world.waiting("asked-only")
    fork = fork_run(first.pk, first.messages.latest("seq").seq, text="and now?")
    for run in (first, fork):
        assert "in another session" not in text(run), "one was only asked for, the other only copied"
    second, other = approved(world, "b"), approved(world, "c", cents=5001)
    for run, twin in ((first, second), (second, first)):
        shown = page(run)
        assert words in " ".join(shown.text.split())
        assert "by superuser." in shown.text
        assert "No effect of this session" not in shown.text, "no comfort beside a warning"
        assert url(twin) in shown.links
    assert "in another session" not in text(other)


def test_what_is_masked_is_masked_beside_the_same_call_elsewhere(world: World) -> None:
    runs = [approved(world, session, tools=[secretive]) for session in "ab"]
    shown = page(runs[0])
    assert "in another session" in shown.text
    assert "DE02-secret" not in shown.html


def test_a_call_that_did_nothing_did_nothing_twice() -> None:
    turn = {"tools": [call("refuses", cents=5)]}
    assert TWICE not in text(ran("refused", turn, turn, tools=[refuses]))


def test_the_conversation_comes_first_and_reads_as_people_write() -> None:
    mail = call(
        "send_mail", to="ben@example.com", body="Hello Ben,\n\nyour money is on its way.\n" + "x" * 400
    )
    run = ran("mailer", {"text": "I **write** to him.", "tools": [mail, call("post", text="noted")]}, tools=[
        send_mail, *shop_agent("any").tools.values(),
    ])  # fmt: skip
    shown = page(run)
    place = 0
    order = ("Conversation", "task of mailer", "I write to him.", "Mail to ben@example.com", "read it")
    for words in (*order, "Hello Ben,", "post noted", "What it did"):
        place = shown.text.index(words, place)
    assert "<strong>write</strong>" in shown.html
    assert "Hello Ben,\n\nyour money is on its way.\n" + "x" * 400 in shown.text
    assert shown.text.index("post noted") < shown.text.index("Steps, and what each took")


def test_who_decided_and_what_a_person_said_became_of_it(world: World) -> None:
    approval = world.waiting()
    assert "waits for a decision" in text(approval.run)
    approve(approval.pk, user("decider"), reason="He is right.")
    sweep()
    assert "decider: Approved. He is right." in text(approval.run)
    doubt = world.orphaned()
    (call_id,) = doubt.pending_calls
    assert "In doubt: MemoryError inside the tool." in text(doubt)
    resolve_orphan(doubt.pk, call_id, "occurred", user("superuser"), evidence="it is on the statement")
    assert "superuser: it happened. it is on the statement" in text(doubt)


def test_a_takeover_is_said_of_the_call_that_was_at_work() -> None:
    run = Run.objects.get(
        pk=run_agent(shop_agent("dead", {"tools": [call("lookup", number="A1")]}), "look", "s9").run_id
    )
    begun = run.messages.get(kind="tool_started").seq
    rows = [row for row in run_rows("default", run.pk) if row.seq <= begun]
    why = "Its worker fell silent; another one took the run over."
    taken = rows[-1]._replace(
        seq=begun + 1, kind="run_resumed", call_id="", payload={"reason": "lease expired"}
    )
    for shown, notes in ((rows, []), (rows[:-1], [why])):
        talk = Talk(run, NOTHING, {}, whole=None, is_plain=False)
        talk.add([*shown, taken])
        [line] = talk.lines.values()
        assert [turn.note for turn in talk.turns if turn.note] == notes
        assert line.says == ([] if notes else [why])


def test_what_is_sensitive_is_masked(world: World) -> None:
    run = world.waiting("secret", tools=[secretive]).run
    for query in ("", "?rows=full"):
        assert "DE02-secret" not in page(run, query=query).html


SPELT = {"7731x": "7 7 3 1 x", "7x": "7x"}


@tool(sensitive=["pin"], describe=lambda args: f"Open with {SPELT[args['pin']]}")
def unlock(pin: str) -> str:
    """Open a door."""
    return "open"


@pytest.mark.parametrize("pin", SPELT)
def test_a_tools_own_sentence_is_masked_as_on_a_card(pin: str) -> None:
    shown = text(ran("doors", {"tools": [call("unlock", pin=pin)]}, tools=[unlock]))
    assert "***" in shown
    assert f" {SPELT[pin]} " not in shown


def test_a_reply_goes_on_in_the_session(world: World) -> None:
    run = world.completed()
    form = page(run).forms[url(run, "reply")]
    client = browser("superuser")
    for _click in range(2):
        shown = read(client.post(url(run, "reply"), {**form, "text": "and now?"}, follow=True))
    reader = Run.objects.exclude(pk=run.pk).get()
    assert (reader.session_id, reader.agent, reader.input) == (run.session_id, run.agent, "and now?")
    assert "Earlier in this session" in shown.text
    assert url(run) in shown.links
    form = page(reader).forms[url(reader, "reply")]
    client.post(url(reader, "reply"), {**form, "text": "quickly"})
    assert Run.objects.count() == 2, "the open run reads it"
    assert reader.messages.filter(kind="user").count() == 2


def test_who_writes_into_a_conversation_of_somebody_else_is_named(world: World) -> None:
    given = {"tools": [call("refund", cents=5000)]}
    run_agent(shop_agent("theirs", {"text": "Done."}, given), "task", "s1", actor=user("viewer"))
    first = Run.objects.get()
    form = page(first).forms[url(first, "reply")]
    browser("superuser").post(url(first, "reply"), {**form, "text": "and now?"})
    second = Run.objects.exclude(pk=first.pk).get()
    assert (second.owner_name, "superuser and now?" in text(second)) == ("viewer", True)
    assert "viewer task" in text(first)


def test_nothing_is_an_answer_too() -> None:
    @tool
    def finds_none() -> list[str]:
        """Find nothing."""
        return []

    run = ran("none", {"tools": [call("finds_none")]}, tools=[finds_none])
    assert "Result- all done" in text(run)


def test_a_reply_to_a_run_that_waits_says_when_it_is_read(world: World) -> None:
    approval = world.waiting()
    run = approval.run
    sent = {**page(run).forms[url(run, "reply")], "text": "and now?"}
    shown = read(browser("superuser").post(url(run, "reply"), sent, follow=True))
    assert "Sent. The agent reads it when the run goes on, which waits for a person." in shown.text
    approve(approval.pk, user("superuser"))
    assert "not run yet" in page(run).text


def test_a_reply_that_cannot_be_sent_keeps_what_was_typed(world: World) -> None:
    run, before = world.completed(), snapshot()
    form = page(run).forms[url(run, "reply")]
    empty = browser("superuser").post(url(run, "reply"), {**form, "text": ""})
    assert (empty.status_code, "Nothing was sent." in read(empty).text) == (400, True)
    Run.objects.filter(pk=run.pk).update(agent="gone")
    refused = browser("superuser").post(url(run, "reply"), {**form, "text": "hello?"})
    shown = read(refused)
    assert (refused.status_code, shown.forms[url(run, "reply")]["text"]) == (409, "hello?")
    Run.objects.filter(pk=run.pk).update(agent=run.agent)
    assert snapshot() == before


def test_who_may_not_write_has_no_box(world: World) -> None:
    shop_agent("completed-closed", {"text": "x"}, starters=None)
    run = world.completed("closed")
    shop_agent("completed-closed", {"text": "x"}, starters=None, version="2")
    assert url(run, "reply") not in page(run, "viewer").forms
    before = snapshot()
    assert browser("viewer").post(url(run, "reply"), {"key": "k", "text": "x"}).status_code in (403, 409)
    assert snapshot() == before


def test_the_words_of_a_reply_are_sent_as_they_are_written(world: World) -> None:
    run, client = world.queued(), browser("superuser")
    page(run)
    assert not Draft.objects.exists(), "to open a page asks nobody to store anything"
    assert claim("default", run.pk)
    run.refresh_from_db()
    first = client.get(url(run, "live"), {"after": 2}).content.decode()
    assert not Draft.objects.exists(), "nor does to look at it"
    assert client.post(url(run, "watch")).status_code == 204
    draft = Draft.objects.get()
    assert draft.watched_until > timezone.now()
    seen = first.partition('data-seen="')[2].partition('"')[0]
    assert client.get(url(run, "live"), {"after": 2, "seen": seen}).status_code == 204
    Draft.objects.update(epoch=run.lease_epoch, step=run.step, text="I look <b>it</b> up\u202e")
    grown = client.get(url(run, "live"), {"after": 2, "seen": seen})
    words = read(grown)
    assert "I look <b>it</b> up" in words.text
    assert 'data-part="talk"' not in words.html, "nothing else is new"
    assert "I look <b>it</b> up" in page(run).text
    Draft.objects.update(epoch=run.lease_epoch + 1)
    assert "I look" not in page(run).text, "of a worker that has lost the run"


def test_a_long_run_costs_as_many_queries_as_a_short_one(world: World) -> None:
    counts = []
    for number in (3, 120):
        turns = [{"tools": [call("post", text=f"{number}-{one}")]} for one in range(number)]
        run = ran(f"long-{number}", *turns, session=f"s{number}", max_steps=200)
        with CaptureQueriesContext(connection) as queries:
            shown = page(run)
        counts.append(len(queries))
    assert counts[1] <= counts[0] + 3, "the steps before the page, and whether there are any"
    assert "task of long-120" in shown.text
    assert "Earlier in this run" in shown.text


@tool
def recites(line: str) -> str:
    """Recite."""
    return f"{line} " * 500


def test_a_text_that_is_cut_leads_to_the_whole_of_it() -> None:
    said = "".join(f"{number} " for number in range(2_000))
    turn = {"text": said, "tools": [call("recites", line="verse")]}
    run = ran("poet", turn, {"text": "done"}, tools=[recites])
    shown = page(run)
    asked, answered = (
        run.messages.filter(kind=kind).earliest("seq").seq for kind in ("assistant", "tool_result")
    )
    call_id = run.messages.get(kind="tool_started").call_id
    places = {f"?whole={asked}#said-{asked}": " 1999", f"?whole={answered}#call-{call_id}": "verse " * 500}
    for link, end in places.items():
        assert link in shown.links
        assert end.strip() not in shown.text
        whole = page(run, query=link.partition("#")[0])
        assert end.strip() in whole.text
        assert f'id="{link.partition("#")[2]}"' in whole.html
        assert link not in whole.links
    assert f'id="call-{call_id}" open>' in whole.html


def test_the_model_s_words_can_be_read_as_it_wrote_them(world: World) -> None:
    run = ran("writer", {"text": "I **write** <b>him</b>."})
    assert "?plain=1" in page(run).links
    plain = page(run, query="?plain=1")
    assert "I **write** <b>him</b>." in plain.text
    assert "?" in plain.links, "and back"
    assert f'data-url="{url(run, "live")}?plain=1"' in plain.html
    assert "?plain=1" not in page(world.queued()).links, "nothing to choose"


HANGS = Hanging()


def hangs(args: dict[str, Any]) -> str:
    """Describe a call; all but the first hang."""
    if args["number"]:
        HANGS.hang()
    return f"Wait {args['number']}"


@tool(describe=hangs)
def waits(number: int) -> str:
    """Wait."""
    return "waited"


@tool(describe=lambda args: 1 / 0)
def breaks(number: int) -> str:
    """Break."""
    return "broke"


def test_what_describes_calls_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call("waits", number=number) for number in range(20)]
    run = ran("slow", {"tools": [call("breaks", number=1), *calls]}, tools=[breaks, waits])
    HANGS.reset()
    monkeypatch.setattr("agentruns.tools.card.PATIENCE", 2.0)
    try:
        shown = text(run)
    finally:
        HANGS.let_go()
    assert not HANGS.was_waited_for, "not even the first that hangs"
    assert "breaks(number=1)" in shown
    assert "Wait 0" in shown
    assert "waits 19" in shown, "by its name"


def test_what_describes_a_call_writes_nothing_through_the_request(world: World) -> None:
    threads = set()

    @tool(describe=lambda args: threads.add(threading.get_ident()) or "Tell")
    def tells(text: str) -> str:
        """Tell."""
        return "told"

    run = ran("teller", {"tools": [call("tells", text="x")]}, tools=[tells])
    threads.clear()
    assert "Tell" in text(run)
    assert threads, "asked"
    assert threading.get_ident() not in threads, "not with the connections of the request"
