"""What the policy allows sessions, users and scopes to cost in a day, reserved before each request."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar

import pytest
from django.db import OperationalError, transaction
from django.db.models import Sum

import agentruns
from agentruns import Agent, cancel_run, resume_run, run_agent, start_run
from agentruns.agents.agent import get_agent
from agentruns.engine.worker import advance
from agentruns.models import Run
from agentruns.models.bookkeeping import Reservation, Spending
from agentruns.providers.base import ProviderError
from agentruns.services.data.retention import prune_ended
from agentruns.services.sweep import sweep
from agentruns.testing import Script
from tests.db.dying import die_at, elsewhere
from tests.db.helpers import forget_backoff, payloads, sound, the_run, user
from tests.db.racing import LEVELS, at_once, isolation
from tests.shop.agents import TOOLS, call
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODEL = "claude-sonnet-5-5"
POST = {"tools": [call("post", text="x")], "usage": {"output_tokens": 1_000_000}}  # costs 1
DONE = {"text": "all done", "usage": {"output_tokens": 1_000_000}}
OF_TODAY = "requests at work may use up the scope's budget of today."


class Allows(agentruns.Policy):
    limits: ClassVar[Any] = {}

    def budget(self, run: Run) -> dict[str, Any]:
        if isinstance(self.limits, Exception):
            raise self.limits
        return self.limits


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> Iterator[None]:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 0, "output": 1}}
    settings.AGENTRUNS_POLICY = f"{__name__}.Allows"
    Allows.limits = {"scope": 3}
    yield
    Allows.limits = {}


def spender(*turns: Any, **options: Any) -> Script:
    script = Script(turns or [DONE], MODEL)
    options = {"model_params": {"max_tokens": 1_000_000}, **options}
    Agent("spender", instructions="Spend.", tools=TOOLS, model=script, **options)
    return script


def drive(session: str, **options: Any) -> Run:
    return the_run(run_agent("spender", "do it", session, idempotency_key=session, **options))


def spent() -> dict[str, str]:
    return {row.key: f"{row.spent.normalize():f}" for row in Spending.objects.order_by("pk")}


def test_the_next_request_waits_for_a_person_when_the_day_is_used_up(database_clock: Any) -> None:
    script = spender()
    assert [drive(f"s{number}").status for number in range(4)] == ["completed"] * 3 + ["paused"]
    run = Run.objects.get(status="paused")
    day = f"{database_clock.now:%Y-%m-%d}"
    assert run.blocked_reason.startswith(f"budget_exhausted: scope: 3 of 3 of {day} used. So far: replies 0")
    assert (payloads(run, "run_paused")[0]["budget"], spent()) == ("scope", {"scope:": "3"})
    assert (resume_run(run.pk).status, len(script.requests)) == ("paused", 3)
    database_clock.forward(days=1)
    assert (resume_run(run.pk).status, spent()) == ("completed", {"scope:": "1"})
    assert Spending.objects.count() == 2


def test_sessions_and_users_have_limits_of_their_own() -> None:
    Allows.limits = {"session": Decimal("1.5"), "user": "2", "scope": None}
    ann, bob = user("ann"), user("bob")
    spender(POST, POST, DONE)
    assert drive("s1", actor=ann).blocked_reason.startswith("budget_exhausted: session: 2 of 1.5 of ")
    assert drive("s2", actor=ann).blocked_reason.startswith("budget_exhausted: user: 2 of 2 of ")
    assert drive("s3", actor=bob).blocked_reason.startswith("budget_exhausted: session: 2 of 1.5 of ")
    assert drive("s4").blocked_reason.startswith("budget_exhausted: session: 2 of 1.5 of "), "nobody's"
    assert sum(key.startswith("user:") for key in spent()) == 2


@pytest.mark.parametrize(
    "limits", [OSError("no"), None, {"team": 3}, {"scope": "much"}, {"scope": -1}, {"scope": float("nan")}]
)
def test_a_policy_that_fails_lets_no_request_through(limits: Any) -> None:
    Allows.limits = limits
    script = spender()
    run = drive("s1")
    why = "policy: AGENTRUNS_POLICY failed in budget(); the log says how."
    assert (run.status, run.blocked_reason, script.requests) == ("paused", why, [])
    Allows.limits = {"scope": 3}
    assert resume_run(run.pk).status == "completed"


def test_a_model_without_a_price_is_not_asked(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {}
    script = spender()
    run = drive("s1")
    why = f"no_price: AGENTRUNS_PRICES has no price for {MODEL}, so the policy's budget cannot be kept."
    assert (run.status, run.blocked_reason, script.requests) == ("paused", why, [])


def test_a_run_may_fail_instead() -> None:
    Allows.limits = {"scope": 0}
    spender(on_budget="fail")
    assert drive("s1").error.startswith("BudgetExceededError: scope: 0 of 0 of ")


def test_a_run_waits_while_requests_of_others_may_use_up_the_day() -> None:
    """Costs are reserved by the most that the request may cost."""
    waiting: list[Run] = []

    def meanwhile(request: Any) -> Any:
        assert Reservation.objects.get().amount == 1
        waiting.append(drive("s2"))
        return DONE

    Allows.limits = {"scope": 1}
    script = spender(lambda request: meanwhile(request) if not waiting else DONE)
    assert drive("s1").status == "completed"
    (run,) = waiting
    assert (run.status, run.blocked_reason) == ("queued", f"Waits for its turn: {OF_TODAY}")
    assert (run.attempts, run.not_before is not None, len(script.requests)) == (0, True, 1)
    Allows.limits = {"scope": 2}
    forget_backoff(run)
    assert (sweep().completed, spent(), Reservation.objects.count()) == (1, {"scope:": "2"}, 0)


@pytest.mark.parametrize("where", ["before_model", "after_model", "after_reply"])
def test_a_crash_neither_loses_nor_doubles_a_cost(where: str) -> None:
    look_up = {"tools": [call("lookup", number="A1")], "usage": POST["usage"]}
    spender(look_up, DONE)
    run = die_at(where, get_agent("spender"))
    sweep()
    run = sound(run)
    assert (run.status, run.usage["cost"], spent()) == ("completed", "2", {"scope:": "2"})
    assert not Reservation.objects.exists()


def test_what_a_dead_run_reserved_holds_nobody_up() -> None:
    Allows.limits = {"scope": 1}
    spender()
    run = die_at("after_model", get_agent("spender"))
    assert Reservation.objects.get().run_id == run.pk
    assert drive("s2").status == "completed"
    cancel_run(run.pk)
    assert spent() == {"scope:": "1"}


def test_a_failed_request_counts_what_it_cost() -> None:
    def fail(request: Any) -> Any:
        usage = {"output_tokens": 500_000}
        raise ProviderError("no luck", disposition="pause", type="overloaded_error", usage=usage)

    spender(fail)
    assert (drive("s1").status, spent(), Reservation.objects.count()) == ("paused", {"scope:": "0.5"}, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_twenty_runs_at_once_overshoot_by_one_reply_at_most(level: str) -> None:
    def settled() -> bool:
        Run.objects.filter(status="queued").update(not_before=None)
        sweep()
        return not Run.objects.filter(status__in=("queued", "running")).exists()

    spender()
    runs = [start_run("spender", "do it", f"s{number}") for number in range(20)]
    with isolation(level):
        at_once(*(partial(advance, run, "default") for run in runs))
        wait_for(settled, "all runs to end or pause")
    counts = [Run.objects.filter(status=status).count() for status in ("completed", "paused")]
    assert sum(counts) == 20 and 3 <= counts[0] <= 4, counts
    total = Run.objects.aggregate(sum=Sum("cost"))["sum"]
    assert (spent(), Reservation.objects.count()) == ({"scope:": f"{total:f}".rstrip("0").rstrip(".")}, 0)


def test_a_strict_transaction_notices_what_others_have_reserved_since_it_began() -> None:
    spender()
    first, second = (start_run("spender", "do it", f"s{number}") for number in range(2))
    day = Spending.objects.create(key="scope:", day=date(2026, 12, 1)).day

    def reserve(run: Run) -> Any:
        with transaction.atomic():
            assert not Reservation.objects.filter(run=run).exists()
            if run == second:
                elsewhere(lambda: reserve(first))
            return Spending.reserve("default", run.pk, day, {"scope:": Decimal(1)}, Decimal(1))

    with isolation("REPEATABLE READ"), pytest.raises(OperationalError):  # and is tried again
        reserve(second)
    assert Reservation.objects.get().run_id == first.pk


def test_old_days_are_deleted(database_clock: Any) -> None:
    spender()
    drive("s1")
    database_clock.forward(days=3)
    drive("s2")
    prune_ended(2)
    assert Spending.objects.get().day == database_clock.now.date()
