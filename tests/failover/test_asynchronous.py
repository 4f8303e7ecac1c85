"""Workers at work while the primary dies and an asynchronous replica takes over: nothing is done twice."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection

from agentruns import get_run
from agentruns.journal.verify import problems
from agentruns.models import Run
from tests.commands.running import run as command
from tests.effects import Effects
from tests.failover.orders import acted, begin, is_at, left_alone, noted, settle
from tests.failover.replica import Pair
from tests.settings import DATABASE
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(DATABASE != "postgres", reason="only PostgreSQL has replicas")

Workers = Callable[..., "subprocess.Popen[str]"]
Gates = Callable[[str], Path]


def in_the_handler(pair: Pair, worker: Workers, effects: Effects, gates: Gates) -> list[str]:
    """Fail over while the one worker is in a handler whose start the replica never got."""
    looking, posting = gates("lookup:after"), gates("post:after")
    worker(SHOP_SLOW="lookup:after post:after", SHOP_GATE=str(looking.with_name("gate-{where}")))
    begin()
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    pair.catch_up()
    pair.cut_off()
    looking.unlink()
    wait_for(is_at(effects, "post:after"), "the post")
    pair.kill_primary()
    pair.fail_over()
    posting.unlink()
    return ["said-0"]


def after_the_run(pair: Pair, worker: Workers, effects: Effects, gates: Gates) -> list[str]:
    """Fail over when the worker is done with a run of which the replica has only the beginning."""
    looking = gates("lookup:after")
    worker(SHOP_SLOW="lookup:after", SHOP_GATE=str(looking))
    run = begin()
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    pair.catch_up()
    pair.cut_off()
    looking.unlink()
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    pair.kill_primary()
    pair.fail_over()
    return ["said-0"]


def before_the_claim(pair: Pair, worker: Workers, effects: Effects, gates: Gates) -> list[str]:
    """Fail over to a replica that has the run as it was before the worker claimed it."""
    run = begin()
    pair.catch_up()
    pair.cut_off()
    worker()
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    pair.kill_primary()
    pair.fail_over()
    return ["said-0"]


def by_another(pair: Pair, worker: Workers, effects: Effects, gates: Gates) -> list[str]:
    """Let a worker that did not drive the run find it on the replica; the one that did is dead."""
    looking = gates("lookup:after")
    drives = worker(SHOP_SLOW="lookup:after", SHOP_GATE=str(looking))
    run = begin()
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    worker()
    pair.catch_up()
    pair.cut_off()
    looking.unlink()
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    drives.kill()
    drives.wait()
    pair.kill_primary()
    pair.fail_over()
    return ["said-1"]


def in_the_reply(pair: Pair, worker: Workers, effects: Effects, gates: Gates) -> list[str]:
    """Fail over while the model replies to a result that the replica never got."""
    looking, replying = gates("lookup:after"), gates("reply:before")
    worker(SHOP_SLOW="lookup:after reply:before", SHOP_GATE=str(looking.with_name("gate-{where}")))
    begin(agent="thinks-twice")
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    pair.catch_up()
    pair.cut_off()
    looking.unlink()
    wait_for(is_at(effects, "reply:before"), "the request")
    pair.kill_primary()
    pair.fail_over()
    replying.unlink()
    return ["said-0"]


@pytest.mark.parametrize("story", [in_the_handler, in_the_reply, after_the_run, before_the_claim, by_another])
def test_what_an_asynchronous_replica_lacks_is_done_at_most_once(
    story: Callable[..., list[str]],
    pair: Pair,
    worker: Workers,
    effects: Effects,
    gates: Gates,
    tmp_path: Path,
) -> None:
    [said] = story(pair, worker, effects, gates)
    connection.close()
    run = left_alone(Run.objects.get())
    done = acted(effects)
    assert max(done["post"], done["charge"]) <= 1, done
    assert (run.status, run.blocked_reason[:15]) == ("paused", "journal_rewound")
    wait_for(lambda: "rewound" in (tmp_path / said).read_text(), "the line in the log")
    assert problems(run.session_id) == []
    # The worker lives, and does other work once every run of the old server is held.
    wait_for(noted, "the sweep of the new server")
    assert left_alone(begin(2)).status == "completed"
    command("resume_runs", "--hold-all")
    settle(run, done)
    # Lost calls that had not happened are made now, and nothing twice.
    done = acted(effects)
    assert (done["post"], done["charge"]) == (2, 2)
