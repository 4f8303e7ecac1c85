from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import Min

from agentruns import pause_run, start_run
from agentruns.engine import wakeup
from agentruns.engine.leases import claim
from agentruns.management.base import moment
from agentruns.management.commands import resume_runs
from agentruns.models import Approval, Message, Run
from agentruns.testing import crashing_at, expire_leases
from tests.commands.running import run
from tests.effects import Effects
from tests.programs import ROOT, has_heard
from tests.shop.agents import call, shop_agent
from tests.statements import statement_wrapper
from tests.waiting import LIMIT, wait_for

PEOPLE = "/admin/agentruns/run/?status=person"
pytestmark = pytest.mark.django_db(transaction=True)


def test_one_sweep_drives_what_can_go_on() -> None:
    agent = shop_agent("swept", {"tools": [call("post", text="hi")]})
    gated = shop_agent("gated", {"tools": [call("refund", cents=5000)]})
    start_run(agent, "say hi", "s1", idempotency_key="k1")
    start_run(gated, "refund", "s2", idempotency_key="k2")
    outcome = run("resume_runs")
    counts, line = outcome.out.splitlines()
    assert (outcome.code, counts) == (0, "found 2, driven 2, completed 1, waiting 1")
    card = Approval.objects.get()
    path = f"/admin/agentruns/approval/{card.pk}/change/"
    assert line == f"Run {card.run_id} in session s2: refund waits for approval. {path}"
    assert run("resume_runs").out == f"Nothing can go on now. 1 run waits for a person ({PEOPLE}).\n"
    Run.objects.filter(status="awaiting-approval").update(status="completed")
    assert run("resume_runs").out == "Nothing can go on now.\n"


def test_it_says_each_time_which_runs_it_cannot_take_and_why() -> None:
    queued = start_run(shop_agent("gone"), "go", "s1")
    Run.objects.filter(pk=queued.pk).update(version="0")
    why = f"Session s1: Run {queued.pk} cannot go on here: There is no agent 'gone' version '0' in"
    counts, line = run("resume_runs").out.splitlines()
    assert (counts, line[: len(why)]) == ("blocked 1", why)
    idle, line = run("resume_runs").out.splitlines()
    assert idle == "Nothing can go on now. No process that looked could take these:"
    assert line[: len(why)] == why
    assert run("resume_runs", "--dry-run").out.splitlines() == [idle, line]
    assert run("resume_runs", "--json").lines[0]["unserved"] == 1
    other = start_run(shop_agent("other"), "go", "s2")
    assert run("resume_runs", "--run", str(other.pk)).out == "found 1, driven 1, completed 1\n"
    assert run("resume_runs", "--run", str(other.pk)).out == "Nothing can go on now.\n"


def test_it_names_the_runs_it_held_ten_at_most() -> None:
    agent = shop_agent("dies", {"tools": [call("post", text="hi")]})
    for number in range(12):
        start_run(agent, "go", f"s{number}", idempotency_key=f"k{number}")
        with crashing_at("after_tool"):
            run("resume_runs")
    expire_leases()
    counts, *lines, more = run("resume_runs").out.splitlines()
    assert (counts, more) == ("found 12, driven 12, waiting 12", "and 2 more")
    first = Message.objects.filter(kind="orphan_found").order_by("run__created_at")[0]
    path = f"/admin/agentruns/run/{first.run_id}/calls/{first.call_id}/"
    assert lines[0] == f"Run {first.run_id} in session s0: did post happen? {path}"
    assert len(lines) == 10


@pytest.mark.parametrize("runs", [1, 2])
def test_what_is_known_when_nothing_can_go_on(runs: int) -> None:
    agent = shop_agent("swept")
    queued = [start_run(agent, "go", f"s{number}", idempotency_key=f"k{number}") for number in range(runs)]
    assert None not in [claim("default", one.pk) for one in queued]
    for number in range(runs):
        pause_run(start_run(agent, "go", f"p{number}", idempotency_key=f"p{number}").pk)
    until = Run.objects.filter(status="running").aggregate(first=Min("lease_expires_at"))["first"]
    said = run("resume_runs").out
    assert said == run("resume_runs", "--dry-run").out
    held = ["1 run is held by a live lease", "2 runs are held by live leases, the first"][runs - 1]
    assert said.startswith(f"Nothing can go on now. {held} until {moment(until)} UTC; ")
    waits = ["1 run waits", "2 runs wait"][runs - 1]
    assert said.endswith(f" {waits} for a person ({PEOPLE}).\n")
    printed = run("resume_runs", "--json").lines[0]
    assert (printed["found"], printed["leased"], printed["for_people"]) == (0, runs, runs)
    assert datetime.fromisoformat(printed["leased_until"]) == until
    assert run("resume_runs", f"--run={queued[0].pk}", "--json").lines[0]["leased"] == 1


def test_only_one_run_or_only_some_and_a_dry_run_drives_none() -> None:
    agent = shop_agent("swept")
    runs = [start_run(agent, "go", f"s{number}", idempotency_key=f"k{number}") for number in range(3)]
    lines = run("resume_runs", "--dry-run").out.splitlines()[1:]
    assert [line.split()[:4] for line in lines] == [
        [str(one.pk), "queued", "swept", f"s{number}"] for number, one in enumerate(runs)
    ]
    assert run("resume_runs", "--dry-run", "--json").lines[0]["id"] == str(runs[0].pk)
    assert run("resume_runs", f"--run={runs[1].pk}").out.startswith("found 1, driven 1")
    assert Run.objects.get(status="completed").pk == runs[1].pk
    (told,) = run("resume_runs", "--limit=1", "--json").lines
    assert (told["found"], told["driven"], told["completed"]) == (1, 1, 1)
    assert run("resume_runs", "--run=nonsense").code == 1


def test_a_drive_that_fails_is_counted_and_is_exit_1() -> None:
    def broken(request: object) -> object:
        raise RuntimeError("the model object is broken")

    start_run(shop_agent("broken", broken), "go", "s1", idempotency_key="k1")
    start_run(shop_agent("swept"), "go", "s2", idempotency_key="k2")
    outcome = run("resume_runs")
    assert outcome.code == 1
    assert outcome.out == "found 2, driven 1, errors 1, completed 1\n"


@pytest.mark.parametrize(
    "options", ["--watch --dry-run", "--interval=0", "--interval=x", "--limit=0", "--hold-all --watch"]
)
def test_usage(options: str) -> None:
    with pytest.raises(SystemExit) as caught:
        resume_runs.Command().run_from_argv(["manage.py", "resume_runs", *options.split()])
    assert caught.value.code == 2


@pytest.mark.parametrize("size", [1, 16])
def test_a_watching_worker_survives_a_database_that_is_away(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def last(request: object) -> dict[str, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"text": "done"}

    start_run(shop_agent("swept", last), "go", "s1", idempotency_key="k1")
    is_away = [True]

    def statement(execute: Any, sql: Any, *about: Any) -> Any:
        if "agentruns_run" in str(sql) and is_away:
            is_away.clear()
            raise OperationalError("the server is restarting")
        return execute(sql, *about)

    with statement_wrapper(statement):
        outcome = run("resume_runs", "--watch", "--interval=0.01", f"--concurrency={size}")
    assert outcome.out.splitlines()[1:] == ["found 1, driven 1, completed 1", "Stopped."]
    assert "Sweep failed" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_idle_worker_waits_twice_as_long_each_time_up_to_the_interval(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def wait(seconds: float, stop: Any, bell: Any) -> bool:
        pauses.append(seconds)
        if len(pauses) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(pauses) == 6  # the doorbell rings

    monkeypatch.setattr(resume_runs, "_wait", wait)
    monkeypatch.setattr(wakeup, "separate_connection", lambda alias: None)  # as in memory
    outcome = run("resume_runs", "--watch", "--interval=0.8")
    assert "No doorbell on this database: it looks every 0.8 s." in outcome.out
    assert pauses == [0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.1, 0.2]


class TestWatchingProcess:
    @pytest.fixture
    def watcher(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        (tmp_path / "gate").touch()
        gate = {"SHOP_SLOW": "post:after", "SHOP_GATE": str(tmp_path / "gate")}
        gate |= {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"])}
        child = subprocess.Popen(
            [sys.executable, "-m", "django", "resume_runs", "--watch", "--interval=0.05"],
            cwd=ROOT, env={**os.environ, **gate, "DJANGO_SETTINGS_MODULE": "tests.settings"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        yield child
        child.kill()
        child.communicate()

    def test_a_second_signal_leaves_at_once(self, watcher: subprocess.Popen[str], effects: Effects) -> None:
        start_run("posts-in-the-middle", "go", "s1", idempotency_key="k1")
        wait_for(lambda: effects.count("at:post:after") == 1, "the call")
        watcher.send_signal(signal.SIGINT)
        wait_for(lambda: has_heard(watcher), "it to hear the first one")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=LIMIT) == -signal.SIGINT

    def test_sigterm_finishes_the_call_and_gives_the_run_back(
        self, watcher: subprocess.Popen[str], effects: Effects, tmp_path: Path
    ) -> None:
        queued = start_run("posts-in-the-middle", "go", "s1", idempotency_key="k1")
        wait_for(lambda: effects.count("at:post:after") == 1, "the call")
        watcher.send_signal(signal.SIGTERM)
        wait_for(lambda: has_heard(watcher), "it to hear the signal")
        assert watcher.poll() is None
        (tmp_path / "gate").unlink()
        out, err = watcher.communicate(timeout=LIMIT)
        assert watcher.returncode == 0, err
        assert out.splitlines()[-1] == "Stopped."
        queued.refresh_from_db()
        assert (queued.status, queued.lease_expires_at, queued.attempts) == ("queued", None, 0)
        assert [line["tool"] for line in effects.lines() if "tool" in line] == ["lookup", "post"]


def test_hold_all_and_no_drive(effects: Effects) -> None:
    start_run(shop_agent("held", {"tools": [call("post", text="x")]}), "do it", "s1", idempotency_key="k1")
    assert run("resume_runs", "--no-drive").out == "found 1, notified 1\n"
    assert run("resume_runs", "--hold-all").out == "Held 1 run for staff.\n"
    assert run("resume_runs", "--hold-all", "--json").lines == [{"held": 0}]
    said = run("resume_runs", "--surface-orphans").out
    assert said == f"Nothing can go on now. 1 run waits for a person ({PEOPLE}).\n"
    assert (Run.objects.get().status, effects.count()) == ("paused", 0)
