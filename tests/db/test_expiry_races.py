"""A sweep found a card whose time is over; before it can end it, somebody else was there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from agentruns import answer, approve, cancel_run, extend
from agentruns.exceptions import ApprovalStateError, JournalConflictError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run
from agentruns.services import approvals
from agentruns.services.approvals import expire_due
from tests.db.helpers import payloads, run_out, run_turns
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def card() -> Approval:
    """An approval that waits."""
    return Approval.objects.get(pk=run_turns({"tools": [call("refund", cents=5000)]}).pending[0].pk)


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """`first(act)`: right before the next service writes, somebody else does this."""

    def first(act: Callable[[], object]) -> None:
        real = approvals.write

        def write(*given: Any, **options: Any) -> Run:
            monkeypatch.setattr(approvals, "write", real)
            act()
            return real(*given, **options)

        monkeypatch.setattr(approvals, "write", write)

    return first


def looks_over(card: Approval) -> None:
    """Let the list of cards be late: its row says that the time is over, its journal does not."""
    Approval.objects.filter(pk=card.pk).update(expires_at=Now() - timedelta(seconds=1))


def decided(card: Approval) -> list[str]:
    return [payload["verb"] for payload in payloads(card.run, "approval_decided")]


def test_it_was_given_more_time(card: Approval) -> None:
    """The list is read before the lock is taken, and what it says of a card may be old by then."""
    looks_over(card)
    assert (expire_due(), decided(card)) == (0, [])
    card.refresh_from_db()
    assert card.status == "pending"


def test_it_was_decided(card: Approval, first: Any) -> None:
    looks_over(card)

    def decide() -> None:
        Approval.objects.filter(pk=card.pk).update(expires_at=None)
        approve(card.pk, None, digest=card.digest)

    first(decide)
    assert (expire_due(), decided(card)) == (0, ["approve"])
    assert problems(card.run.session_id) == []


def test_its_run_was_cancelled(card: Approval, first: Any) -> None:
    run_out(card)
    first(lambda: cancel_run(card.run_id))
    assert (expire_due(), decided(card)) == (0, [])
    card.refresh_from_db()
    assert (card.status, Run.objects.get().status) == ("cancelled", "cancelled")
    assert problems(card.run.session_id) == []


def test_the_journal_is_busy(card: Approval, monkeypatch: pytest.MonkeyPatch) -> None:
    run_out(card)

    def busy(*given: Any, **options: Any) -> Run:
        raise JournalConflictError("somebody writes all the time")

    with monkeypatch.context() as patch:
        patch.setattr(approvals, "write", busy)
        assert (expire_due(), decided(card)) == (0, [])
    assert (expire_due(), decided(card)) == (1, ["expire"])
    assert problems(card.run.session_id) == []


def test_what_cannot_be_meant_changes_nothing(card: Approval) -> None:
    for act, told in (
        (lambda: answer(card.pk, None, "  "), "An answer needs a text"),
        (lambda: extend(card.pk, None, timedelta()), "must be positive"),
        (lambda: extend(card.pk, None, timedelta(days=367)), "at most 366 days"),
        (lambda: extend(card.pk, None, timedelta(days=1)), "never expires; there is nothing to extend"),
        (lambda: approve(card.pk, None, arguments={"cents": "many"}), "arguments do not fit refund"),
    ):
        with pytest.raises(ApprovalStateError, match=told):
            act()
    assert (decided(card), Run.objects.get().status) == ([], "awaiting-approval")
    assert problems(card.run.session_id) == []
