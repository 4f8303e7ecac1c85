from __future__ import annotations

import pytest

from agentruns import run_agent
from agentruns.models import Run
from tests.commands.running import run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_queues_a_fork_and_says_where(effects: Effects) -> None:
    agent = shop_agent("forked", {"tools": [call("post", text="hi")]})
    done = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    refused = run("fork_run", str(done.run_id), "--at", "6")
    assert (refused.code, "say in a text what to do" in refused.err) == (1, True)
    assert run("fork_run", str(done.run_id), "--at", "6", "--text", "").code == 2
    assert run("fork_run", str(done.run_id), "--at", "99").code == 1
    assert run("fork_run", str(done.run_id), "--at", "6", "--text", "x", "--agent", "nobody").code == 1
    outcome = run("fork_run", str(done.run_id), "--at", "6", "--text", "again", "--session", "mine")
    fork = Run.objects.get(origin=done.run_id)
    assert (outcome.code, str(fork.pk) in outcome.out, fork.session.key) == (0, True, "mine")
    (shown,) = run("fork_run", str(done.run_id), "--at", "5", "--json").lines
    assert (shown["status"], shown["origin"], shown["origin_seq"]) == ("queued", str(done.run_id), 5)
    assert effects.count() == 1
    rows = run("show_run", str(fork.pk)).out.partition("\n\n")[2].splitlines()
    assert ["(copied)" in row for row in rows] == [True] * 6 + [False] * 2
