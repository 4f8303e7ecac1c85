"""Servers that nobody here wrote: git and time, and one on the SDK's classes over HTTP."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentruns import approve, resume_run, run_agent, tool
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.tools import Tool
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


@contextmanager
def serving(port: int = 0, era: str = "modern") -> Iterator[str]:
    """Run the SDK's server, and yield its URL."""
    command, quiet = [sys.executable, "-m", "tests.mcp.honest", str(port), era], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def answers() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/").status_code > 0
            return False

        wait_for(answers, "the server")
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of the SDK's server."""
    with serving() as place:
        yield place


def test_the_server_of_the_sdk_over_http(url: str, tmp_path: Path) -> None:
    tools = lock(url, "h", tmp_path / "h.json", requires_approval=False)
    assert [tool.name for tool in tools] == ["h__add", "h__fail", "h__say_hello"]
    turn = {"tools": [call("h__add", first=1, second=2), call("h__say_hello"), call("h__fail")]}
    run_agent(shop_agent("adds", turn, tools=tools), "do it", "s1")
    contents = [row.payload["content"] for row in Message.objects.filter(kind="tool_result").order_by("seq")]
    assert contents[:2] == [{"total": 3}, {"result": "Hello you"}]
    assert contents[2].startswith("McpError: Error executing tool fail")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_server_that_is_started_anew_between_two_calls_of_a_drive(tmp_path: Path, era: str) -> None:
    """In the era with sessions it has forgotten the session, and answers 404 to the second call."""
    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(serving(0, era))

        @tool(safe_to_retry=True)
        def deploy() -> str:
            first.close()
            second.enter_context(serving(int(url.split(":")[2].split("/")[0]), era))
            return "deployed"

        tools = [*lock(url, "h", tmp_path / "h.json", requires_approval=False), deploy]
        turns = [call("h__add", first=1, second=2), call("deploy"), call("h__add", first=3, second=4)]
        run_agent(shop_agent("deploys", *({"tools": [each]} for each in turns), tools=tools), "do it", "s1")
    contents = [row.payload["content"] for row in Message.objects.filter(kind="tool_result").order_by("seq")]
    assert contents == [{"total": 3}, "deployed", {"total": 7}]
