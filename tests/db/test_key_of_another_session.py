"""An idempotency key names one task in one session: nobody gets the run of another one without a word."""

from __future__ import annotations

import pytest

from agentruns import fork_run, run_agent, start_run
from agentruns.agents.agent import Agent
from agentruns.exceptions import RunStateError
from agentruns.models import Session
from tests.api.http import Api
from tests.commands.running import run as command
from tests.db.helpers import user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(effects: Effects) -> Agent:
    return shop_agent("shop", {"tools": [call("post", text="hello")]})


def test_python_refuses_the_key_and_names_the_run_and_its_session(shop: Agent, effects: Effects) -> None:
    Session.objects.create(key="customer-3")
    run = start_run(shop, "say hello", "customer-1", idempotency_key="k1")
    for _ in range(2):  # whether the run has ended or not, and whether there is such a session or not
        for ask, other in ((run_agent, "customer-2"), (start_run, "customer-3")):
            why = f"'k1' belongs to run {run.pk} of session 'customer-1', not of '{other}'"
            with pytest.raises(RunStateError, match=why):
                ask(shop, "say hello", other, idempotency_key="k1")
        assert run_agent(shop, "say hello", "customer-1", idempotency_key="k1").run_id == str(run.pk)
    assert not Session.objects.filter(key="customer-2").exists(), "nothing is left of a refusal"
    assert run_agent(shop, "say hello", "customer-2", idempotency_key="k2").status == "completed"
    refused = command("run_agent", "shop", "say hello", "--idempotency-key=k1", "--session=customer-2")
    assert (refused.code, "of session 'customer-1'" in refused.err) == (1, True)
    again = command("run_agent", "shop", "say hello", "--idempotency-key=k1")
    assert (again.code, "in session customer-1 is completed" in again.out) == (0, True)
    assert effects.count() == 2
    fork = fork_run(run.pk, 5, session="by letter", idempotency_key="once")
    with pytest.raises(RunStateError, match="a fork in session 'by letter', not in 'by mail'"):
        fork_run(run.pk, 5, session="by mail", idempotency_key="once")
    for same in ({"session": "by letter"}, {}):
        assert fork_run(run.pk, 5, idempotency_key="once", **same) == fork  # type: ignore[arg-type]


def test_the_api_answers_409_with_the_run(shop: Agent) -> None:
    api = Api(user("owner"))
    body = {"agent": "shop", "input": "say hello", "idempotency_key": "k1"}
    status, made = api.post("/runs", {**body, "session": "customer-1"})
    assert status == 201
    status, problem = api.post("/runs", {**body, "session": "customer-2"})
    assert (status, problem["type"], problem["run_id"]) == (409, "urn:agentruns:run-state", made["id"])
    assert "of session 'customer-1'" in problem["detail"]
    status, same = api.post("/runs", body)
    assert (status, same["id"]) == (200, made["id"]), "a request that names no session takes any"
    at = {"at": 1, "text": "and?", "idempotency_key": "once"}
    assert api.post(f"/runs/{made['id']}/fork", {**at, "session": "by letter"})[0] == 201
    assert api.post(f"/runs/{made['id']}/fork", {**at, "session": "by mail"})[0] == 409
