"""LangGraph: its react agent, now `create_agent` of LangChain, with a saver and durability "sync"."""

from __future__ import annotations

import sqlite3
import time
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from psycopg import Connection
from psycopg.rows import dict_row

from benchmarks.workload import Workload

VARIANTS = ("langgraph-postgresql", "langgraph-sqlite")

graph: Any
workload: Workload
stamps: list[float]


class Instant(BaseChatModel):
    """A model that answers at once with what the workload says."""

    @property
    def _llm_type(self) -> str:
        return "instant"

    def bind_tools(self, tools: Any, **options: Any) -> Instant:
        """Return itself: it knows what to ask for."""
        return self

    def _generate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        stamps.append(time.perf_counter())
        text, calls = workload.reply(len(stamps) - 1)
        asked = [{"name": "look_up", "args": {"query": query}, "id": call} for call, query in calls]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text, tool_calls=asked))])


@tool
def look_up(query: str) -> str:
    """Return what the workload says."""
    return workload.result(int(query))


def saver(url: str) -> PostgresSaver | SqliteSaver:
    """Return the checkpointer of a database, with its tables made."""
    made: PostgresSaver | SqliteSaver
    if url.startswith("postgres"):  # connected as PostgresSaver.from_conn_string does
        made = PostgresSaver(
            Connection.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row)
        )
    else:
        made = SqliteSaver(sqlite3.connect(url, check_same_thread=False))
    made.setup()
    return made


def prepare(variant: str, url: str) -> None:
    """Build the agent."""
    global graph
    graph = create_agent(Instant(), [look_up], checkpointer=saver(url))


def run(given: Workload) -> list[float]:
    """Invoke the graph on a thread of its own."""
    global workload, stamps
    workload, stamps = given, []
    config = {"configurable": {"thread_id": str(uuid4())}, "recursion_limit": 10 * given.steps + 100}
    graph.invoke({"messages": [("user", "Look it all up.")]}, config, durability="sync")
    return [*stamps, time.perf_counter()]
