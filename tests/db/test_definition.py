"""A run goes on under the definition it was started with, or under another that staff adopted."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from agentruns import Agent, adopt_definition, resume_run, run_agent, start_run, tool
from agentruns.engine.leases import Lease, claim
from agentruns.exceptions import DurableConfigMismatchError, PermissionDeniedError, RunStateError
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases
from tests.db.helpers import outcomes, payloads, the_run, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_staff_adopt_the_new_definition() -> None:
    with isolated_registry():
        run = start_run(shop_agent("drift"), "do it", "s1", idempotency_key="k")
    staff = user("staff", "adopt_definition", "resume_run")
    with isolated_registry():
        shop_agent("drift", max_steps=7)
        assert sweep().blocked == 1
        with pytest.raises(PermissionDeniedError, match="adopt_definition"):
            adopt_definition(run.pk, user("eve"))
        adopted = adopt_definition(run.pk, staff, reason="only the limit changed")
        assert (adopted.status, adopted.blocked_reason) == ("queued", "")
        with pytest.raises(RunStateError, match="already"):
            adopt_definition(run.pk, staff)
        assert sweep().completed == 1
    run = Run.objects.get()
    (row,) = payloads(run, "run_adopted")
    assert (row["actor"]["name"], row["new"]) == ("staff", run.definition_id)
    assert row["old"] != row["new"]
    with pytest.raises(RunStateError, match="has ended"):
        adopt_definition(run.pk)


def test_the_runs_own_version_comes_before_a_newer_one() -> None:
    with isolated_registry():
        agent = shop_agent("versions", version="1")
        first, run = (start_run(agent, "do it", key, idempotency_key=key) for key in ("s1", "s2"))
    with isolated_registry():
        shop_agent("versions", version="1")
        shop_agent("versions", version="2", max_steps=7)
        assert resume_run(first.pk).status == "completed"
    with isolated_registry():
        shop_agent("versions", version="2", max_steps=7)
        with pytest.raises(DurableConfigMismatchError):
            resume_run(run.pk)
        assert adopt_definition(run.pk).version == "2"
        assert resume_run(run.pk).status == "completed"


def test_a_call_started_before_is_judged_by_what_its_tool_declared_then(effects: Effects) -> None:
    """Declaring it safe afterwards does not make an effect that may have happened repeatable."""

    def deployed(**declares: Any) -> Agent:
        @tool(name="act", **declares)
        def act() -> str:
            """Act."""
            effects.record("act")
            return "acted"

        return shop_agent("changed", {"tools": [call("act")]}, tools=[act])

    with isolated_registry(), crashing_at("after_tool"):
        run_agent(deployed(), "do it", "s1", idempotency_key="k")
    expire_leases()
    run = Run.objects.get()
    with isolated_registry():
        deployed(safe_to_retry=True)
        adopt_definition(run.pk)
        sweep()
        run.refresh_from_db()
        assert (run.status, effects.count()) == ("orphaned", 1)
        assert outcomes(the_run(resume_run(run.pk))) == ["unknown"]
    assert effects.count() == 1


def test_what_is_adopted_just_before_the_claim_is_what_drives(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(shop_agent("moved", {"tools": [call("post", text="old")]}), "do it", "s1")

    def adopt_first(alias: str, run_id: UUID) -> Lease | None:
        shop_agent("moved", {"tools": [call("post", text="new")]}, max_steps=7)
        adopt_definition(run_id, reason="deployed")
        return claim(alias, run_id)

    with monkeypatch.context() as patch:
        patch.setattr("agentruns.engine.worker.claim", adopt_first)
        assert (sweep().queued, effects.count()) == (1, 0)
    assert sweep().completed == 1
    assert [line["text"] for line in effects.lines()] == ["new"]
    run.refresh_from_db()
    assert run.attempts == 0
