"""Eight workers want one run, 200 times (24 in `make test`) at each isolation level; exactly one gets it."""

from __future__ import annotations

import threading
from datetime import timedelta
from uuid import UUID

import pytest
from django.db.models import F
from django.db.models.functions import Now

from agentruns import start_run
from agentruns.engine.leases import Lease, claim
from agentruns.models import Run
from tests.db.racing import LEVELS, LIMIT, at_once, isolation
from tests.settings import BRIEF
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

CLAIMERS, (PASSES, RUNS) = 8, (3, 8) if BRIEF else (5, 40)


def set_free(expired: list[UUID]) -> None:
    """Make every run claimable again; those named by a lease that nobody extended."""
    Run.objects.update(status="queued", lease_owner="", lease_expires_at=None, attempts=0)
    Run.objects.filter(pk__in=expired).update(
        status="running",
        lease_owner="dead",
        lease_epoch=F("lease_epoch") + 1,
        lease_expires_at=Now() - timedelta(seconds=1),
    )


def claimed_by_all(runs: list[UUID]) -> list[tuple[Lease | None, ...]]:
    """Let all claimers go for the same run at the same time, run after run, on connections they keep."""
    meet = threading.Barrier(CLAIMERS)

    def claimer() -> list[Lease | None]:
        try:
            return [claim("default", run_id) for run_id in runs if meet.wait(LIMIT) is not None]
        except BaseException:
            meet.abort()
            raise

    by_claimer = at_once(*[claimer] * CLAIMERS)
    assert not [failed for failed in by_claimer if isinstance(failed, Exception)], by_claimer
    return list(zip(*by_claimer, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_eight_claimers_wins_each_time(level: str) -> None:
    agent = shop_agent("claimed")
    runs = [start_run(agent, "do it", f"s{number}").pk for number in range(RUNS)]
    expired = runs[::2]
    with isolation(level):
        for _ in range(PASSES):
            set_free(expired)
            before = dict(Run.objects.values_list("pk", "lease_epoch"))
            for run_id, leases in zip(runs, claimed_by_all(runs), strict=True):
                run, (lease,) = Run.objects.get(pk=run_id), [each for each in leases if each is not None]
                assert (run.status, run.lease_epoch) == ("running", lease.epoch)
                assert lease.epoch == before[run_id] + 1, "one claim, one epoch"
                assert lease.took_over is (run_id in expired)
                assert lease.attempts == run.attempts == (run_id in expired)
