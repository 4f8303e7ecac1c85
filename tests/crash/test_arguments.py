"""Arguments of every kind reach the handler as the same Python values, whoever dies in between."""

from __future__ import annotations

import pytest

from agentruns import approve
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.crash.arguments import act, bound, ordered, register, started
from tests.crash.processes import LEASE, expire_lease, interpret_and_die
from tests.db.helpers import payloads
from tests.effects import Effects

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]


def die(action: str, **death: str) -> Run:
    """Let a process of its own do `action` and be killed in it; wait out its lease."""
    start = f"import django; django.setup(); from tests.crash.arguments import act; act({action!r})"
    interpret_and_die("-c", start, AGENTRUNS_TEST_LEASE=str(LEASE), **death)
    run = Run.objects.get()
    expire_lease(run)
    return run


def test_a_default_is_made_once_and_every_process_sees_the_same_values(effects: Effects) -> None:
    die("orders", AGENTRUNS_CRASH_AT="after_reply")
    run = die("sweep", ORDER_KILL="NoneType None")
    register()
    assert sweep().completed == 1
    (call,) = payloads(run, "assistant")[0]["calls"]
    ((times, seen),) = ordered(effects)
    assert (times, effects.count("fresh"), started(run)) == (2, 1, [call["digest"]] * 3)
    bound(call["arguments"], call["digest"], seen)


def test_what_a_person_approved_is_what_every_attempt_is_given(effects: Effects) -> None:
    """Of two equal calls one is approved as it is, the other with an edit, and a process dies in that."""
    act("asks-to-order")
    plain, card = Approval.objects.order_by("requested_at", "pk")
    approve(plain.pk, None, digest=plain.digest)
    shown = {**card.arguments, "price": "0.99", "missing": 4}
    edited = approve(card.pk, None, digest=card.digest, arguments=shown)
    assert (edited.arguments, edited.digest != card.digest) == (shown, True)
    run = die("sweep", ORDER_KILL="int 4")
    assert sweep().completed == 1
    (once, first), (twice, second) = ordered(effects)
    assert (once, twice, effects.count("fresh")) == (1, 2, 2)
    bound(plain.arguments, plain.digest, first)
    bound(shown, edited.digest, second, price="Decimal 0.99", missing="int 4")
    assert started(run) == [plain.digest, edited.digest, edited.digest]
    assert set(Approval.objects.values_list("status", flat=True)) == {"consumed"}
