"""Servers that nobody here wrote: git and time, and one on the SDK's classes over HTTP."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentruns import approve, resume_run, run_agent
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.tools import Tool
from agentruns.tools.mcp import client
from tests.mcp.servers import lock
from tests.programs import ROOT, run_program
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def server(name: str) -> str:
    """The path of a server of requirements-dev.txt; what uses it is skipped where it was not installed."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"there is no {path}: install requirements-dev.txt")
    return str(path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and one file to add."""
    if shutil.which("git") is None:
        pytest.skip("there is no git on PATH, which mcp-server-git starts")
    folder = tmp_path / "repository"
    git(folder.parent, "init", "-q", str(folder))
    git(folder, "config", "user.email", "tests@example.com")
    git(folder, "config", "user.name", "Tests")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    (folder / "note.txt").write_text("hello\n")
    return folder


def git(folder: Path, *words: str) -> str:
    return run_program("git", *words, cwd=folder).stdout


def git_tools(tmp_path: Path, repository: Path, **options: Any) -> list[Tool]:
    command = [server("mcp-server-git"), "--repository", str(repository)]
    return lock(command, "git", tmp_path / "git.json", **options)


def test_git_commits_once_after_a_person_said_so(tmp_path: Path, repository: Path) -> None:
    tools = git_tools(tmp_path, repository, trust_hints=True, allow=["git_add", "git_commit", "git_log"])
    where = {"repo_path": str(repository)}
    agent = shop_agent(
        "committer",
        {"tools": [call("git__git_add", **where, files=["note.txt"])]},
        {"tools": [call("git__git_commit", **where, message="second")]},
        {"tools": [call("git__git_log", **where)]},
        tools=tools,
    )
    run = run_agent(agent, "do it", "s1")
    for waits in ("git__git_add", "git__git_commit"):
        card = Approval.objects.get(status="pending")
        assert card.tool_name == waits
        approve(card.pk, None)
        resume_run(run.run_id)
    assert Run.objects.get().status == "completed"
    assert git(repository, "log", "--format=%s").split() == ["second", "first"]
    *_, log = Message.objects.filter(kind="tool_result").order_by("seq")
    assert "second" in str(log.payload["content"])
    assert problems(Run.objects.get().session_id) == []


def test_time_tells_the_time_and_needs_nobody(tmp_path: Path) -> None:
    command = f"{server('mcp-server-time')} --local-timezone=UTC"
    tools = lock(command, "clock", tmp_path / "clock.json", trust_hints=True)
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    agent = shop_agent("times", {"tools": [call("clock__convert_time", **arguments)]}, tools=tools)
    assert run_agent(agent, "do it", "s1").status == "completed"
    assert "21:00" in str(Message.objects.get(kind="tool_result").payload["content"])


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of the SDK's server."""
    command, quiet = [sys.executable, "-m", "tests.mcp.honest"], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        place = f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"

        def answers() -> bool:
            try:
                return bool(client.list_tools(client.Target(url=place), {}))
            except Exception:
                return False

        wait_for(answers, "the server")
        yield place
        process.kill()


def test_the_server_of_the_sdk_over_http(url: str, tmp_path: Path) -> None:
    tools = lock(url, "h", tmp_path / "h.json", requires_approval=False)
    assert [tool.name for tool in tools] == ["h__add", "h__fail", "h__say_hello"]
    turn = {"tools": [call("h__add", first=1, second=2), call("h__say_hello"), call("h__fail")]}
    run_agent(shop_agent("adds", turn, tools=tools), "do it", "s1")
    contents = [row.payload["content"] for row in Message.objects.filter(kind="tool_result").order_by("seq")]
    assert contents[:2] == [{"total": 3}, {"result": "Hello you"}]
    assert contents[2].startswith("McpError: Error executing tool fail")
