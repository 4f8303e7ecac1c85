from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentruns.agents.agent import Agent
from agentruns.models import Approval
from agentruns.services.runs import run_agent
from tests.api.http import Api, make_user
from tests.shop.agents import call, shop_agent


@pytest.fixture
def shop() -> Agent:
    """An agent whose refund over 1000 cents asks a person."""
    return shop_agent("shop", {"tools": [call("refund", cents=5000)]})


@pytest.fixture
def owner(db: None) -> Any:
    return make_user("owner")


@pytest.fixture
def decider(db: None) -> Any:
    return make_user("decider", "decide_approval")


@pytest.fixture
def api(owner: Any) -> Api:
    """The API as the owner of runs uses it."""
    return Api(owner)


@pytest.fixture
def pending(shop: Agent, owner: Any) -> Callable[..., Approval]:
    """Make a pending approval of a run, owned by `owner` if nobody else is named."""

    def make(session: str = "s1", actor: Any = owner) -> Approval:
        result = run_agent(shop, "refund it", session, actor=actor, idempotency_key=session)
        assert result.status == "awaiting-approval"
        approval: Approval = result.pending[0]
        return approval

    return make
