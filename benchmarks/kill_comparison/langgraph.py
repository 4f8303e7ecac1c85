"""LangGraph: an interrupted thread goes on when it is invoked again with no input."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

from benchmarks.kill_comparison import world
from benchmarks.systems.langgraph import saver

THREAD = {"configurable": {"thread_id": world.ORDER}}


class Model(BaseChatModel):
    """Asks for one tool after the other."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Model:
        """Return itself: it knows what to ask for."""
        return self

    def _generate(self, messages: Any, *unused: Any, **options: Any) -> ChatResult:
        step = sum(isinstance(message, AIMessage) for message in messages)
        name = world.propose(step)
        asked = [{"name": name, "args": {}, "id": f"call_{step}"}] if name else []
        return ChatResult(generations=[ChatGeneration(message=AIMessage("next", tool_calls=asked))])


@tool
def find_order(runtime: ToolRuntime) -> str:
    """Find the order."""
    return world.act("find_order", str(runtime.tool_call_id))


@tool
def charge_card(runtime: ToolRuntime) -> str:
    """Charge the card."""
    return world.act("charge_card", str(runtime.tool_call_id))


@tool
def send_receipt(runtime: ToolRuntime) -> str:
    """Send the receipt."""
    return world.act("send_receipt", str(runtime.tool_call_id))


def build(url: str) -> Any:
    """Return the agent."""
    return create_agent(Model(), [find_order, charge_card, send_receipt], checkpointer=saver(url))


def start(variant: str, url: str) -> None:
    """Invoke the agent, with the most durable mode it has."""
    build(url).invoke({"messages": [("user", world.ORDER)]}, THREAD, durability="sync")


def recover(variant: str, url: str) -> world.Outcome:
    """Invoke the thread again."""
    agent = build(url)
    agent.invoke(None, THREAD, durability="sync")
    state = agent.get_state(THREAD)
    messages = state.values["messages"]
    charges = [each for each in messages if isinstance(each, ToolMessage) and each.name == "charge_card"]
    errors = sum(each.status == "error" for each in charges)
    record = f"{len(charges)} tool message, {errors} errors"
    return world.Outcome(world.BY_ITSELF, record, "interrupted" if state.next else "finished")
