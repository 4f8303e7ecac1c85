"""The transcripts of the demo as replies of FakeAnthropic."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.e2e.demo_project import ROOT

MODEL = "claude-sonnet-5-5"
SIDE_PATHS = {"Not executed": "if_refused", "tool-durability-error": "if_unknown"}


def transcript(ticket: int) -> dict[str, Any]:
    path = ROOT / "fixtures" / "transcripts" / f"ticket-{ticket}.json"
    return dict(json.loads(path.read_text()))


def script(body: dict[str, Any]) -> dict[str, Any]:
    """Find the next turn of the ticket that the conversation begins with."""
    found = re.search(r"ticket (\d+)", json.dumps(body["messages"][0]), re.IGNORECASE)
    assert found is not None
    ticket, replies = transcript(int(found[1])), 0
    for message in body["messages"]:
        replies += message["role"] == "assistant"
        for sign, path in SIDE_PATHS.items():
            if path in ticket and message["role"] == "user" and sign in json.dumps(message):
                ticket["turns"] = [*ticket["turns"][:replies], *ticket[path]]
    return dict(ticket["turns"][replies])
