"""The transcripts of the demo as replies of FakeAnthropic."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.e2e.demo_project import ROOT

MODEL = "claude-sonnet-5-5"
SIDE_PATHS = {"Not executed": "if_refused", "tool-durability-error": "if_unknown"}


# The kind of the transcripts of an agent, by a tool that only this agent has
KINDS = {"show_photo": "photo", "await_return": "return", "search_articles": "ticket"}


def transcript(ticket: int, kind: str = "ticket") -> dict[str, Any]:
    path = ROOT / "fixtures" / "transcripts" / f"{kind}-{ticket}.json"
    return dict(json.loads(path.read_text()))


def transcript_of(task: Any, tools: Any) -> dict[str, Any]:
    """Find the transcript of the ticket that a conversation begins with, for the agent with these tools."""
    found = re.search(r"ticket (\d+)", json.dumps(task), re.IGNORECASE)
    assert found is not None
    names = json.dumps(tools)
    return transcript(int(found[1]), next(kind for tool, kind in KINDS.items() if f'"{tool}"' in names))


def script(body: dict[str, Any]) -> dict[str, Any]:
    """Find the next turn of the ticket that the conversation begins with."""
    ticket, replies = transcript_of(body["messages"][0], body["tools"]), 0
    for message in body["messages"]:
        replies += message["role"] == "assistant"
        for sign, path in SIDE_PATHS.items():
            if path in ticket and message["role"] == "user" and sign in json.dumps(message):
                ticket["turns"] = [*ticket["turns"][:replies], *ticket[path]]
    return dict(ticket["turns"][replies])
