"""The demo with a model of another provider, at a server that one variable names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.e2e.claude import SIDE_PATHS, transcript
from tests.e2e.demo_project import EFFECTS, STATUSES, Project
from tests.fake_openai import FakeOpenAI, chat

MODEL = "llama3.3"


def script(body: Any) -> dict[str, Any]:
    """Return the next turn of the ticket that the conversation begins with."""
    found = re.search(r"ticket (\d+)", json.dumps(body["messages"][1]), re.IGNORECASE)
    assert found is not None
    told, turns = transcript(int(found[1])), []
    turns = list(told["turns"])
    for number, message in enumerate(body["messages"]):
        for sign, path in SIDE_PATHS.items():
            if path in told and message["role"] == "tool" and sign in json.dumps(message):
                turns = [*turns[: chat.replies({"messages": body["messages"][:number]})], *told[path]]
    return dict(turns[chat.replies(body)])


def test_the_demo_works_with_a_local_server_and_one_variable(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with FakeOpenAI(script, api_key="none", models=[MODEL]) as fake:
        demo = project.run("demo", MODEL=f"openai:{MODEL}", OPENAI_BASE_URL=fake.url)
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert {(call.path, call.status) for call in fake.calls} == {("/v1/chat/completions", 200)}
    assert f"openai:{MODEL}" in demo.stdout
    assert [(line["session"], line["kind"]) for line in project.ledger()] == EFFECTS
    runs = project.runs()
    assert {session: run["status"] for session, run in runs.items()} == STATUSES
    replies = [row["payload"] for row in project.journal(runs["ticket-1"]) if row["kind"] == "assistant"]
    assert {reply["model"] for reply in replies} == {f"openai:{MODEL}"}
