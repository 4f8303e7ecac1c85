"""The conversation of a run: readable as people talk, honest about what ran twice, and gone on with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.utils import timezone

from agentruns import approve, run_agent
from agentruns.admin.runs.chat import Talk
from agentruns.engine.leases import claim
from agentruns.journal.masking import Mask
from agentruns.journal.read import run_rows
from agentruns.models import Draft, Run
from agentruns.services.runs.control import resolve_orphan
from agentruns.services.runs.forks import fork_run
from agentruns.services.sweep import sweep
from agentruns.tools import tool
from tests.admin.pages import look, queries, read, says, text, unchanged, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, ran, secretive
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import Hanging

pytestmark = pytest.mark.django_db(transaction=True)
TWICE = "ran 2 times with equal arguments"


def reply(run: Run, role: str = "superuser", **sent: str) -> Any:
    """Send a text from the page of a run as it is now."""
    form = look(run, role=role).forms[url(run, "reply")]
    return browser(role).post(url(run, "reply"), {**form, **sent}, follow=True)


def test_equal_calls_of_a_session_are_said_in_red_with_their_rows() -> None:
    turn = {"tools": [call("post", text="hello"), call("lookup", number="A1")]}
    first = ran("once", turn)
    shown = text(first)
    assert TWICE not in shown
    assert "No effect of this session ran twice with equal arguments." in shown
    second = ran("again", turn)
    starts = first.session.messages.filter(kind="tool_started", tool_name="post").order_by("seq")
    for run in (first, second):
        page = look(run, f"post {TWICE}")
        assert f"lookup {TWICE}" not in page.text, "it may be repeated"
        assert "ran twice with equal arguments" not in page.text
        for row in starts:
            assert f"/admin/agentruns/run/{row.run_id}/at/?seq={row.seq}" in page.links
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
    first = approved(world, "a")
    world.waiting("asked-only")
    fork = fork_run(first.pk, first.messages.latest("seq").seq, text="and now?")
    for run in (first, fork):
        assert "in another session" not in text(run), "one was only asked for, the other only copied"
    second, other = approved(world, "b"), approved(world, "c", cents=5001)
    for run, twin in ((first, second), (second, first)):
        page = look(run)
        told = "refund(cents=5000): This exact call was approved and started in another session,"
        assert told in words(page)
        assert "by superuser." in page.text
        assert "No effect of this session" not in page.text, "no comfort beside a warning"
        assert url(twin) in page.links
    assert "in another session" not in text(other)


@tool
def refuses(cents: int) -> str:
    """Refuse."""
    raise ValueError("nothing was paid")


@tool
def finds_none() -> list[str]:
    """Find nothing."""
    return []


def test_a_call_that_did_nothing_did_nothing_twice_and_nothing_is_an_answer_too() -> None:
    turn = {"tools": [call("refuses", cents=5)]}
    assert TWICE not in text(ran("refused", turn, turn, tools=[refuses]))
    none = ran("none", {"tools": [call("finds_none")]}, session="s2", tools=[finds_none])
    assert "Result- all done" in text(none)


@tool(describe=lambda args: f"Mail to {args['to']}")
def send_mail(to: str, body: str) -> str:
    """Send a mail."""
    return "sent"


def test_the_conversation_comes_first_and_reads_as_people_write() -> None:
    body = "Hello Ben,\n\nyour money is on its way.\n" + "x" * 400
    calls = [call("send_mail", to="ben@example.com", body=body), call("post", text="noted")]
    turn = {"text": "I **write** to him.", "tools": calls}
    page = look(ran("mailer", turn, text="task of mailer", tools=[send_mail, *TOOLS]))
    place = 0
    for said in (
        "Conversation", "task of mailer", "I write to him.", "Mail to ben@example.com", "read it",
        body, "post noted", "What it did",
    ):  # fmt: skip
        place = page.text.index(said, place)
    assert "<strong>write</strong>" in page.html
    assert page.text.index("post noted") < page.text.index("Steps, and what each took")


def test_who_decided_how_often_a_tool_started_and_what_a_person_said_became_of_it(world: World) -> None:
    approval = world.waiting()
    run = approval.run
    shown = text(run)
    assert "waits for a decision" in shown
    assert "was started" not in shown
    approve(approval.pk, user("decider"), reason="He is right.")
    sweep()
    shown = text(run)
    assert "decider: Approved. He is right." in shown
    assert "A tool was started 1 time. No effect of this session ran twice" in shown
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="more")
    assert "was started" not in text(fork), "the history of its origin is not its own"
    doubt = world.orphaned()
    (call_id,) = doubt.pending_calls
    assert "In doubt: MemoryError inside the tool." in text(doubt)
    resolve_orphan(doubt.pk, call_id, "not_occurred", user("superuser"), evidence="it is on no statement")
    assert "superuser: it did not happen. it is on no statement" in text(doubt)
    sweep()
    assert "Tools were started 2 times. 1 call was started more than once." in text(doubt)


def test_a_takeover_is_said_of_the_call_that_was_at_work() -> None:
    run = ran("dead", {"tools": [call("lookup", number="A1")]})
    begun = run.messages.get(kind="tool_started").seq
    rows = [row for row in run_rows("default", run.pk) if row.seq <= begun]
    why = "Its worker fell silent; another one took the run over."
    taken = rows[-1]._replace(
        seq=begun + 1, kind="run_resumed", call_id="", payload={"reason": "lease expired"}
    )
    for shown, notes in ((rows, []), (rows[:-1], [why])):
        talk = Talk(run, Mask(), {}, whole=None, is_plain=False)
        talk.add([*shown, taken])
        [line] = talk.lines.values()
        assert [turn.note for turn in talk.turns if turn.note] == notes
        assert line.says == ([] if notes else [why])


SPELT = {"7731x": "7 7 3 1 x", "7x": "7x"}


@tool(sensitive=["pin"], describe=lambda args: f"Open with {SPELT[args['pin']]}")
def unlock(pin: str) -> str:
    """Open a door."""
    return "open"


def test_what_is_sensitive_is_masked_also_in_a_tools_own_sentence(world: World) -> None:
    runs = [approved(world, session, tools=[secretive]) for session in "ab"]
    assert "in another session" in text(runs[0])
    for run in (runs[0], world.waiting("secret", tools=[secretive]).run):
        for query in ("", "?rows=full"):
            assert "DE02-secret" not in look(run, query=query).html
    for pin, spelt in SPELT.items():
        shown = text(
            ran("doors", {"tools": [call("unlock", pin=pin)]}, session=f"door-{len(pin)}", tools=[unlock])
        )
        assert "***" in shown
        assert f" {spelt} " not in shown


def test_a_reply_goes_on_in_the_session(world: World) -> None:
    run = world.completed()
    key = look(run).forms[url(run, "reply")]["key"]
    for _click in range(2):
        shown = read(reply(run, text="and now?", key=key))
    reader = Run.objects.exclude(pk=run.pk).get()
    assert (reader.session_id, reader.agent, reader.input) == (run.session_id, run.agent, "and now?")
    assert "Earlier in this session" in shown.text
    assert url(run) in shown.links
    reply(reader, text="quickly")
    assert Run.objects.count() == 2, "the open run reads it"
    assert reader.messages.filter(kind="user").count() == 2
    approval = world.waiting()
    told = "Sent. The agent reads it when the run goes on, which waits for a person."
    says(reply(approval.run, text="and now?"), told)
    approve(approval.pk, user("superuser"))
    assert "not run yet" in text(approval.run)


def test_who_writes_into_a_conversation_of_somebody_else_is_named() -> None:
    given = {"tools": [call("refund", cents=5000)]}
    run_agent(shop_agent("theirs", {"text": "Done."}, given), "task", "s1", actor=user("viewer"))
    first = Run.objects.get()
    reply(first, text="and now?")
    second = Run.objects.exclude(pk=first.pk).get()
    assert (second.owner_name, "superuser and now?" in text(second)) == ("viewer", True)
    assert "viewer task" in text(first)


def test_a_reply_that_cannot_be_sent_keeps_the_text_and_who_may_not_write_has_no_box(world: World) -> None:
    run = world.completed()
    with unchanged():
        says(reply(run, text=""), "Nothing was sent.", status=400)
        Run.objects.filter(pk=run.pk).update(agent="gone")
        page = says(browser("superuser").post(url(run, "reply"), {"key": "k", "text": "hello?"}), status=409)
        assert page.forms[url(run, "reply")]["text"] == "hello?"
        Run.objects.filter(pk=run.pk).update(agent=run.agent)
    shop_agent(run.agent, {"text": "x"}, starters=None, version="2")
    assert url(run, "reply") not in look(run, role="viewer").forms
    with unchanged():
        assert browser("viewer").post(url(run, "reply"), {"key": "k", "text": "x"}).status_code in (403, 409)


def test_the_words_of_a_reply_are_sent_as_they_are_written(world: World) -> None:
    run, client = world.queued(), browser("superuser")
    look(run)
    assert not Draft.objects.exists(), "to open a page asks nobody to store anything"
    assert claim("default", run.pk)
    run.refresh_from_db()
    first = client.get(url(run, "live"), {"after": 2}).content.decode()
    assert not Draft.objects.exists(), "nor does to look at it"
    assert client.post(url(run, "watch")).status_code == 204
    assert Draft.objects.get().watched_until > timezone.now()
    seen = first.partition('data-seen="')[2].partition('"')[0]
    assert client.get(url(run, "live"), {"after": 2, "seen": seen}).status_code == 204
    Draft.objects.update(epoch=run.lease_epoch, step=run.step, text="I look <b>it</b> up\u202e")
    page = says(client.get(url(run, "live"), {"after": 2, "seen": seen}), "I look <b>it</b> up")
    assert 'data-part="talk"' not in page.html, "nothing else is new"
    assert "I look <b>it</b> up" in text(run)
    Draft.objects.update(epoch=run.lease_epoch + 1)
    assert "I look" not in text(run), "of a worker that has lost the run"


def test_a_long_run_costs_as_many_queries_as_a_short_one() -> None:
    counts = []
    for number in (3, 120):
        turns = [{"tools": [call("post", text=f"{number}-{one}")]} for one in range(number)]
        run = ran(f"long-{number}", *turns, text="the task", session=f"s{number}", max_steps=200)
        counts.append(len(queries(lambda one=run: look(one))))  # type: ignore[misc]
    assert counts[1] <= counts[0] + 3, "the steps before the page, and whether there are any"
    shown = text(run)
    assert "the task" in shown and "Earlier in this run" in shown


@tool
def recites(line: str) -> str:
    """Recite."""
    return f"{line} " * 500


def test_a_text_that_is_cut_leads_to_the_whole_of_it_and_to_the_models_own_words(world: World) -> None:
    said = "I **write** <b>him</b>. " + "".join(f"{number} " for number in range(2_000))
    turn = {"text": said, "tools": [call("recites", line="verse")]}
    run = ran("poet", turn, {"text": "done"}, tools=[recites])
    shown = look(run)
    asked, answered = (
        run.messages.filter(kind=kind).earliest("seq").seq for kind in ("assistant", "tool_result")
    )
    call_id = run.messages.get(kind="tool_started").call_id
    places = {f"?whole={asked}#said-{asked}": " 1999", f"?whole={answered}#call-{call_id}": "verse " * 500}
    for link, end in places.items():
        assert link in shown.links
        assert end.strip() not in shown.text
        query, _, anchor = link.partition("#")
        whole = look(run, query=query)
        assert end.strip() in whole.text
        assert f'id="{anchor}"' in whole.html
        assert link not in whole.links
    assert f'id="call-{call_id}" open>' in whole.html
    assert "?plain=1" in shown.links
    plain = look(run, "I **write** <b>him</b>.", query="?plain=1")
    assert "?" in plain.links, "and back"
    assert f'data-url="{url(run, "live")}?plain=1"' in plain.html
    assert "?plain=1" not in look(world.queued()).links, "nothing to choose"


HANGS = Hanging()
THREADS: set[int] = set()


def hangs(args: dict[str, Any]) -> str:
    """Describe a call; all but the first hang."""
    if args["number"]:
        HANGS.hang()
    return f"Wait {args['number']}"


@tool(describe=hangs)
def waits(number: int) -> str:
    """Wait."""
    return "waited"


@tool(describe=lambda args: THREADS.add(threading.get_ident()) or 1 / 0)
def breaks(number: int) -> str:
    """Break."""
    return "broke"


def test_calls_are_described_elsewhere_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call("breaks", number=1), *(call("waits", number=number) for number in range(20))]
    run = ran("slow", {"tools": calls}, tools=[breaks, waits])
    HANGS.reset()
    THREADS.clear()
    monkeypatch.setattr("agentruns.tools.card.PATIENCE", 2.0)
    try:
        shown = text(run)
    finally:
        HANGS.let_go()
    assert not HANGS.was_waited_for, "not even the first that hangs"
    for said in ("breaks(number=1)", "Wait 0", "waits 19"):  # the last by its name
        assert said in shown
    assert THREADS, "asked"
    assert threading.get_ident() not in THREADS, "not with the connections of the request"
