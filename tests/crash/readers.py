"""An agent that reads a mail and then sends one, for a process that is to be killed, and for the next one."""

from __future__ import annotations

from tests.db.outsiders import READ, SEND, reader

agent = reader(READ, SEND, name="crash-reader")
clerk = reader(READ, name="crash-clerk")
HAND_OVER = {"tools": [{"name": "crash-clerk", "input": {"task": "read it"}}]}
boss = reader(HAND_OVER, SEND, name="crash-reading-lead", tools=[*agent.tools.values(), clerk.as_tool()])
