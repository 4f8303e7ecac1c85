"""Damage to the journal and to what is folded from it: found, named, and mended where it can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

import agentruns.services.data.repair
from agentruns import approve, cancel_run, deny, run_agent, start_run
from agentruns.journal import verify
from agentruns.journal.read import stored_rows
from agentruns.journal.verify import History, check, problems
from agentruns.models import Approval, Message, Run, Session, triggers
from agentruns.services.data.repair import repair_session
from agentruns.services.sweep import sweep
from tests.db.helpers import run_turns, the_run
from tests.rows import change as change_row, forge, row_of, sealed
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

CARD = {"tools": [call("refund", cents=5000)]}
LEASE = ("lease_owner", "lease_epoch", "lease_expires_at", "not_before", "attempts", "updated_at")


@pytest.fixture
def approved() -> Run:
    """A completed run of three replies; the approved call is of the first."""
    run = the_run(run_turns(CARD, {"tools": [call("post", text="hi")]}))
    approve(Approval.objects.get().pk, None)
    sweep()
    run = Run.objects.get(pk=run.pk)
    assert (run.status, run.step, problems(run.session_id)) == ("completed", 3, [])
    return run


def edited(kind: str, **changes: Any) -> Callable[[Any], None]:
    """Build a change of the payload of the first row of a kind."""
    return lambda rows: change_row(rows.filter(kind=kind).first(), **changes)


def updated(kind: str, tool_name: str = "", /, **changes: Any) -> Callable[[Any], object]:
    """Build a change of the columns of the rows of a kind, or of one tool's."""
    return lambda rows: rows.filter(kind=kind, tool_name__contains=tool_name).update(**changes)


def test_what_is_whole_has_no_problems_and_costs_as_many_queries_however_long_it_is() -> None:
    turn = {"tools": [call("refund", cents=5000), call("refund", cents=6000)]}
    run = the_run(run_turns(turn))
    with CaptureQueriesContext(connection) as short:
        assert problems(run.session_id) == []
    cancel_run(run.pk)
    for number in range(3):
        result = run_agent("agent-s1", f"again {number}", "s1", idempotency_key=f"k{number}")
        deny(Approval.objects.pending().first().pk, None, "no")  # type: ignore[union-attr]
        cancel_run(result.run_id)
    assert (Run.objects.count(), Approval.objects.count()) == (4, 8)
    with CaptureQueriesContext(connection) as longer:
        assert problems(run.session_id) == []
    assert len(longer) == len(short) == 6


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (updated("user", created_at="2020-01-01T00:00:00Z"), "seq 2 (user) was altered"),
        (lambda rows: rows.filter(seq=3).update(hash="f" * 64), "seq 3 (assistant) was altered"),
        (lambda rows: rows.filter(seq=3).update(prev_hash="f" * 64), "seq 3 (assistant) does not follow"),
        (lambda rows: rows.filter(seq=4)._raw_delete("default"), "seq 4 is missing; the next row is 5"),
        (lambda rows: rows.filter(seq__gt=9)._raw_delete("default"), "ends at 9: rows 10 to 12 are lost."),
        (updated("tool_started", consumes=None), "(tool_started) was altered"),
        (lambda rows: Session.objects.update(head="f" * 64), "its head is not the hash of seq"),
        (lambda rows: Session.objects.update(next_seq=100), "ends at 12: the session was altered."),
        (lambda rows: Session.objects.update(next_seq=4), "its head is seq 3, the journal ends at 12"),
    ],
)
def test_an_altered_journal_is_found(approved: Run, change: Any, found: str) -> None:
    with triggers.lifted(connection):
        change(Message.objects.filter(session_id=approved.session_id))
    (problem,) = check(approved.session_id)
    assert found in str(problem)
    assert problem.session == "s1"
    assert problem.seq is not None


@pytest.mark.parametrize("part", ["facts", "content"])
@pytest.mark.parametrize("text", ["' ' || {part}", "'{{' || {part}", "''"])
def test_the_hash_is_of_the_stored_text_whether_it_parses_or_not(approved: Run, text: str, part: str) -> None:
    with triggers.lifted(connection), connection.cursor() as cursor:
        cursor.execute(f"UPDATE agentruns_message SET {part} = {text.format(part=part)} WHERE seq = 2")
    assert problems(approved.session_id) == ["Session s1: seq 2 (user) was altered."]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (updated("tool_started", "post", call_id="x"), "of call x, which no reply asked"),
        (updated("tool_result", "post", call_id="x"), "of call x, which no reply asked"),
        (updated("approval_requested", call_id="x"), "(approval_requested) is of"),
        (updated("approval_decided", call_id="x"), "(approval_decided) is of call"),
        (updated("tool_started", "refund", consumes=None), "starts call"),
        (updated("tool_started", attempt=2), "is attempt 2 of call"),
        (updated("approval_decided", kind="note"), "which is pending."),
        (edited("approval_decided", verb="deny"), "which is denied."),
        (edited("approval_decided", digest="f" * 64), "decides on another digest"),
        (edited("tool_started", digest="f" * 64), "with other arguments than were recorded"),
        (edited("approval_requested", digest="f" * 64), "with other arguments than it has"),
        (edited("approval_requested", approval="no id"), "(approval_requested) cannot be folded: ValueError"),
        (updated("tool_result", kind="note"), "is a reply while call"),
        (updated("tool_started", kind="note"), "was done, which never started"),
        (updated("run_started", facts={"v": 1}), "seq 1 (run_started) cannot be folded"),
    ],
)
def test_a_forged_journal_is_found_by_what_it_says(approved: Run, change: Any, found: str) -> None:
    forge(approved.session_id, lambda rows: None)
    assert problems(approved.session_id) == []
    forge(approved.session_id, change)
    (problem,) = check(approved.session_id)
    assert found in str(problem)
    assert repair_session("default", approved.session_id) == ([], [problem])


def test_what_the_databases_constraints_refuse_is_found_too(approved: Run) -> None:
    """The constraints may have been dropped, so nothing here leans on them."""
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("tool_result", {}, "is a second result of call"),
        ("tool_started", {"attempt": 2}, "starts call"),
        ("approval_requested", {}, "a second time"),
        ("approval_decided", {}, "which is consumed already"),
        ("assistant", {}, "a second time"),
        ("orphan_found", {}, "doubts call"),
    ]
    for kind, changes, found in cases:
        history = History(approved.session)
        assert history.read("default") is None
        source = Message.objects.filter(kind="tool_started" if kind == "orphan_found" else kind)
        row = row_of(source.earliest("seq"))
        row = row._replace(kind=kind, seq=history.seq + 1, prev_hash=history.head, **changes)
        assert found in str(history.add(*sealed(approved.session_id, row)))


def test_an_approval_is_consumed_once(approved: Run) -> None:
    forge(
        approved.session_id,
        lambda rows: rows.filter(kind="tool_result", tool_name="refund").update(
            kind="tool_started", attempt=2, facts=rows.get(consumes__isnull=False).facts, content={}
        ),
    )
    (problem,) = problems(approved.session_id)
    assert "is a reply while call" in problem  # a second attempt is one of the same approval
    row = Message.objects.get(consumes__isnull=False)
    history = History(approved.session)
    for one, parts in stored_rows(Message.objects.filter(seq__lte=row.seq)):
        assert history.add(one, parts) is None
    again = row_of(row)._replace(seq=row.seq + 1, attempt=2, prev_hash=row.hash)
    second = history.add(*sealed(approved.session_id, again))
    assert f"consumes approval {row.consumes} a second time" in str(second)


DAMAGE: list[tuple[Any, dict[str, Any]]] = [
    (Run, {"status": "failed"}),
    (Run, {"status": "queued"}),
    (Run, {"step": 7}),
    (Run, {"usage": {"input_tokens": 1}}),
    (Run, {"pending_calls": ["x"]}),
    (Run, {"output": None}),
    (Run, {"output": "long " * 1000}),
    (Run, {"error": "Boom: it broke"}),
    (Approval, {"status": "pending"}),
    (Approval, {"status": "approved"}),
    (Approval, {"title": "Nothing much"}),
    (Approval, {"digest": "f" * 64}),
    (Approval, {"arguments": {"cents": 1, "card": "4111-1111"}}),
    (Approval, {"approved_count": 2}),
    (Run, {"status": "lost", "output": "", "step": 0, "error": "x"}),
]


def test_a_folded_column_is_found_and_mended_and_nothing_else_touched(approved: Run) -> None:
    def everything() -> list[Any]:
        return [list(each.objects.order_by("pk").values()) for each in (Message, Session, Run, Approval)]

    before = everything()
    for model, changes in DAMAGE:
        model.objects.update(**changes)
        found = check(approved.session_id)
        assert {problem.column for problem in found} == set(changes)
        for problem in found:
            assert f": {problem.column} " in str(problem)
            assert len(str(problem)) < 500
        assert "4111-1111" not in str(found[0])
        assert repair_session("default", approved.session_id) == (found, [])
        assert everything() == before
        assert repair_session("default", approved.session_id) == ([], [])
    for text in ("", "{", "\\u0000"):  # columns that do not parse
        with connection.cursor() as cursor:
            cursor.execute("UPDATE agentruns_run SET usage = %s, pending_calls = %s", [text, text])
            cursor.execute("UPDATE agentruns_approval SET arguments = %s", [text])
        assert len(problems(approved.session_id)) == 3
        assert repair_session("default", approved.session_id).left == []
        assert everything() == before


def test_rows_that_are_missing_or_too_many_are_named_and_left(approved: Run) -> None:
    card = Approval.objects.get()
    Approval.objects.filter(pk=card.pk).delete()
    assert problems(approved.session_id) == [
        f"Session s1: approval {card.pk} of run {approved.pk} is missing."
    ]
    facts = {"call_id": "x", "tool_name": "post", "arguments": {}, "requested_at": card.requested_at}
    Approval.objects.bulk_create([card, Approval(pk=approved.pk, run=approved, **facts)])
    (extra,) = repair_session("default", approved.session_id).left
    assert str(extra) == f"Session s1: approval {approved.pk} is not one that the journal asked for."
    Approval.objects.filter(pk=approved.pk).delete()
    Approval.objects.update(call_id="y")
    assert "is not one that the journal asked for" in problems(approved.session_id)[0]


def test_a_run_without_rows_and_rows_whose_run_went_elsewhere_are_named(approved: Run) -> None:
    other = Run.objects.create(
        session=approved.session, agent="x", version="1", definition=approved.definition, input="x"
    )
    assert problems(approved.session_id) == [f"Session s1: run {other.pk} has no row in the journal."]
    other.delete()
    elsewhere = Session.objects.create(key="elsewhere")
    Run.objects.update(session=elsewhere)
    assert f"run {approved.pk} is missing, and has rows in the journal." in problems(approved.session_id)[0]
    assert "has no row" in problems(elsewhere.pk)[0]


def test_an_active_run_stays_with_who_drives_it() -> None:
    run = start_run(shop_agent("active"), "do it", "s1", idempotency_key="k")
    becomes = {"queued": "queued", "running": "running", "completed": "queued", "paused": "queued"}
    for stored, status in becomes.items():
        Run.objects.update(status=stored, lease_owner="w", lease_epoch=4, attempts=2)
        lease = Run.objects.values_list(*LEASE).get()
        repair_session("default", run.session_id)
        assert Run.objects.get().status == status
        assert Run.objects.values_list(*LEASE).get() == lease


def test_the_unfinished_run_is_restored_after_the_ended_one(approved: Run) -> None:
    """The other way round they would for a moment be two, which the database refuses."""
    later = run_agent("agent-s1", "again", "s1", idempotency_key="k2")
    assert later.status == "awaiting-approval"
    Run.objects.filter(pk=later.run_id).update(status="failed")
    Run.objects.filter(pk=approved.pk).update(status="paused")
    assert len(repair_session("default", approved.session_id).changed) == 2
    assert problems(approved.session_id) == []


def test_a_repair_that_loses_a_race_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run_turns(CARD)
    Run.objects.update(step=9, status="queued")
    seen: list[int] = []

    def check_slowly(*args: Any, **options: Any) -> Any:
        found = check(*args, **options)
        if not seen:
            names = verify.Problem.__slots__
            fields = [{name: getattr(one, name) for name in names} for one in found]
            found = [verify.Problem(**{**values, "status": "paused"}) for values in fields]
        seen.append(len(found))
        return found

    monkeypatch.setattr(agentruns.services.data.repair, "check", check_slowly)
    session = Session.objects.get().pk
    repair_session("default", session)
    assert seen == [2, 2]
    assert problems(session) == []


def test_a_session_that_is_written_to_meanwhile_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_turns(CARD)
    read, calls = History.read, []

    def read_late(history: History, alias: str) -> Any:
        if not calls:
            approve(Approval.objects.get().pk, None)
        calls.append(history.seq)
        return read(history, alias)

    monkeypatch.setattr(History, "read", read_late)
    assert problems(Session.objects.get().pk) == []
    assert len(calls) == 2
