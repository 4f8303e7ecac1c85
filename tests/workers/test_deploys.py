"""A deploy with runs at approvals and runs in flight: old code and new side by side, and nothing noticed."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import transaction

from agentruns import adopt_definition, approve, start_run
from agentruns.models import Approval, Run
from tests.commands import running
from tests.effects import Effects
from tests.programs import start_program
from tests.registry import isolated_registry
from tests.shop.releases import declare
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

Process = subprocess.Popen[str]
PARKED, IN_FLIGHT = 50, 20


@pytest.fixture
def manage(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`manage("1", "resume_runs", "--watch")`: a command of one release's code, on this test's database."""
    children: list[Process] = []

    def start(release: str, *arguments: str) -> Process:
        environment = {"SHOP_RELEASE": release, "SHOP_PACE": "0.05"}
        children.append(start_program("-m", "django", *arguments, stdout=subprocess.PIPE, **environment))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def began(release: str, name: str, number: int, version: str = "1") -> Run:
    """Start a run as a process of a release would."""
    with isolated_registry():
        agents = declare(release)
        key = f"{name}-{version}-{number}"
        return start_run(agents[name if version == "1" else "newer"], "do it", key, idempotency_key=key)


def count(name: str, status: str, version: str = "1") -> int:
    return Run.objects.filter(agent=name, status=status, version=version).count()


def test_a_deploy(manage: Callable[..., Process], effects: Effects) -> None:
    old = [manage("1", "resume_runs", "--watch", "--interval=0.2") for _ in range(2)]
    for number in range(PARKED):
        began("1", "kept", number)
    wait_for(lambda: count("kept", "awaiting-approval") == PARKED, "the cards")

    # Side by side: what is of the new release waits for it, what is of the old one is not touched by the new.
    new = [manage("2", "resume_runs", "--watch", "--interval=0.2")]
    began("2", "kept", 0, "2")
    wait_for(lambda: count("kept", "completed", "2") == 1, "the new release to drive its own")
    with transaction.atomic():  # they begin with the first when the last is there
        for number in range(IN_FLIGHT):
            began("1", "changed", number)
    wait_for(lambda: count("changed", "running") == len(old), "the first to be in flight")

    # Not by a process: while it started, those in flight would end.
    drain = running.run("drain_runs", "--timeout=180")
    assert (drain.code, "Drained" in drain.out) == (0, True), drain
    assert not Run.objects.filter(status="running", lease_expires_at__isnull=False, agent="changed").exists()
    flying = count("changed", "queued")
    assert 0 < flying < IN_FLIGHT
    new.append(manage("2", "resume_runs", "--watch", "--interval=0.2"))  # began after: drives on
    for card in Approval.objects.pending():
        approve(card.pk, None)
    wait_for(lambda: count("kept", "completed") == PARKED, "the runs that were parked")

    # The old workers are up and idle; nobody serves what was changed under one version, until staff adopt it.
    assert count("changed", "queued") == flying
    wait_for(lambda: not Run.objects.filter(status="queued", blocked_reason="").exists(), "the reason")
    with isolated_registry():
        declare("2")
        for run in Run.objects.filter(agent="changed", status="queued"):
            adopt_definition(run.pk, None, reason="only the instructions differ")
    wait_for(lambda: count("changed", "completed") == IN_FLIGHT, "the runs that were in flight")

    for process in (*old, *new):
        process.send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=LIMIT)[0] for process in (*old, *new)]
    assert [process.returncode for process in (*old, *new)] == [0, 0, 0, 0], outs
    assert ["Draining" in out for out in outs] == [True, True, True, False]
    by_release = check_ledger(effects)
    assert by_release["pay_back"] == {"2": PARKED}, "old workers claimed nothing after the stamp"


def check_ledger(effects: Effects) -> dict[str, Counter[str]]:
    """Check that each effect happened once; return how many of each kind were of which release."""
    keys = Counter(line["key"] for line in effects.lines())
    assert set(keys.values()) == {1}
    assert len(keys) == PARKED * 2 + IN_FLIGHT * 12 + 1
    return {
        kind: Counter(line["release"] for line in effects.lines() if line["tool"] == kind)
        for kind in ("pay_back", "ship")
    }
