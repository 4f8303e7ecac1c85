"""A session and the database make a run durable; there is no switch."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, MemoryStore, run_agent, start_run
from agentruns.exceptions import MemoryStoreNotDurableError
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run, Session
from agentruns.testing import ScriptedModel
from tests.db.helpers import the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_session_alone_makes_the_same_call_durable(effects: Effects) -> None:
    reads = [one for one in TOOLS if not one.transactional]
    agent = shop_agent("either", {"tools": [call("post", text="hi")]}, tools=reads)
    without = run_agent(agent, "do it")
    assert (without.status, without.run_id, Message.objects.count()) == ("completed", None, 0)
    run = the_run(run_agent(agent, "do it", "s1"))
    assert (run.status, Message.objects.count(), effects.count()) == ("completed", 7, 2)


def chatting(asked: list[Any]) -> Agent:
    model = ScriptedModel([lambda request: asked.append(request) or {"text": "hello"}])
    return Agent("chat", instructions="Chat.", model=model)


def test_an_agent_without_tools_is_guarded_too() -> None:
    asked: list[Any] = []
    agent = chatting(asked)
    with pytest.raises(MemoryStoreNotDurableError):
        run_agent(agent, "hi", "s1", store=MemoryStore())
    assert (asked, Session.objects.count()) == ([], 0)
    assert run_agent(agent, "hi", store=MemoryStore()).output == "hello"


class Forgetful(DatabaseStore):
    """A store of somebody else: what it says of itself counts, not its class."""

    durable = False

    def append(self, *arguments: object, **options: object) -> None:
        raise AssertionError("a store that forgets was written to")


class Host:
    """A durable store that shares no class with ours."""

    durable = True

    def __init__(self) -> None:
        self.inner, self.appends = DatabaseStore(), 0

    def append(self, batch: Any, **options: Any) -> None:
        self.appends += 1
        self.inner.append(batch, **options)

    def load(self, session_id: Any, run_id: Any) -> Any:
        return self.inner.load(session_id, run_id)


def test_a_store_is_known_by_what_it_says_of_itself(effects: Effects) -> None:
    agent = shop_agent("stored", {"tools": [call("post", text="hi")]})
    for service in (run_agent, start_run):
        with pytest.raises(MemoryStoreNotDurableError):
            service(agent, "do it", "s1", store=Forgetful())
    assert (Session.objects.count(), effects.count()) == (0, 0)
    store = Host()
    run = the_run(run_agent(agent, "do it", "s1", store=store))
    assert (run.status, effects.count(), store.appends > 0) == ("completed", 1, True)


@pytest.mark.parametrize("option", ["checkpoint_interval", "on_checkpoint", "checkpoint_every", "durable"])
def test_there_is_no_switch_that_sounds_durable(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        Agent("sounds", instructions="x", model=ScriptedModel([]), **{option: True})
    with pytest.raises(TypeError, match=option):
        run_agent(shop_agent("silent"), "do it", "s1", **{option: True})
    assert Run.objects.count() == 0


def test_the_guard_says_both_ways_out() -> None:
    with pytest.raises(MemoryStoreNotDurableError) as refused:
        run_agent(chatting([]), "hi", "s1", store=MemoryStore())
    assert "Leave the store out to use the database" in str(refused.value)
    assert "leave the session out to run statelessly" in str(refused.value)


def test_a_fixed_session_is_made_on_first_use_and_goes_on() -> None:
    said: list[Any] = []
    model = ScriptedModel([lambda request: said.append(request.messages) or {"text": "noted"}])
    agent = Agent("bound", instructions="Remember.", model=model)
    for text in ("first", "second"):
        assert run_agent(agent, text, "room-7", idempotency_key=text).status == "completed"
    assert (Session.objects.get().key, Run.objects.count()) == ("room-7", 2)
    texts = [block["text"] for message in said[1] for block in message["content"]]
    assert texts == ["first", "noted", "second"]
