"""Processes that die inside a call, or fork: the effect happens once, and nobody sends it again."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from agentruns import resolve_orphan, resume_run
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from agentruns.tools.mcp import client
from tests.crash.processes import expire_lease, run_and_die
from tests.effects import VARIABLE, Effects
from tests.mcp import agents  # noqa: F401 - for the parent as well
from tests.mcp.servers import HOSTILE, Declare, acted, drive
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_client_killed_inside_a_call_leaves_it_in_doubt(effects: Effects) -> None:
    """The server itself sends its client a SIGKILL, after the effect."""
    run_and_die("run", "server-kills", "s1", **{VARIABLE: str(effects.path)})
    run = Run.objects.get()
    expire_lease(run)
    sweep()
    run.refresh_from_db()
    assert (run.status, acted(effects, "kills")) == ("orphaned", 1)
    started = Message.objects.get(kind="tool_started")
    assert effects.count(started.payload["key"]) == 1
    assert started.payload["timeout"] == 30, "what is said not to have occurred waits for it"
    resolve_orphan(run.pk, started.call_id, "occurred", None, result="killed")
    resume_run(run.pk)
    run.refresh_from_db()
    assert (run.status, acted(effects, "kills")) == ("completed", 1)
    assert problems(run.session_id) == []


def _in_child(target: client.Target, path: str) -> None:
    names = sorted(each["name"] for each in client.list_tools(target, {}))
    Path(path).write_text(f"{len(names)} tools")
    client.close()


ENDS = """
import multiprocessing, sys
from agentruns.tools.mcp import client

def work():
    given = (("LEDGER", sys.argv[2]), ("STAYS", "1"))
    target = client.Target(command=(sys.executable, sys.argv[1]), env=given)
    client.list_tools(target, {})
    try:
        client.call_tool(target, {}, sys.argv[4], {}, key="k", timeout=2, why_not=lambda listed: "")
    except (client.ToolDurabilityError, client.ToolRefused):  # a slow machine may not even get there
        pass

if sys.argv[3] == "itself":
    work()
else:
    import billiard.context
    of = {"child": multiprocessing.get_context("fork"), "celery": billiard.context.ForkContext()}
    process = of[sys.argv[3]].Process(target=work)
    process.start()
    process.join()
"""


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; nobody may wait for it here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("process", ["itself", "child", "celery"])
@pytest.mark.parametrize("name", ["post", "silent"])
def test_a_server_that_does_not_end_by_itself_ends_with_the_process_that_asked_it(
    process: str, name: str, effects: Effects
) -> None:
    """After an answer and after a time-out; a child of Celery's ends without `atexit`."""
    command = [sys.executable, "-c", ENDS, HOSTILE, str(effects.path), process, name]
    subprocess.run(command, check=True, timeout=180)
    (pid,) = [line["pid"] for line in effects.lines() if line["key"] == "process"]
    wait_for(lambda: is_gone(pid), "the server to be gone")


def test_what_a_server_started_ends_with_it(hostile: Declare, effects: Effects) -> None:
    drive(hostile(CHILD="yes"), "dies")
    for line in [line for line in effects.lines() if line["key"] == "process"]:
        wait_for(lambda pid=line["pid"]: is_gone(pid), "its child to be gone")  # type: ignore[misc]


def test_a_fork_opens_its_own_session_and_leaves_its_parents(
    hostile: Declare, tmp_path: Path, effects: Effects
) -> None:
    hostile()
    target = client.Target(command=(sys.executable, HOSTILE), env=(("LEDGER", str(effects.path)),))
    client.list_tools(target, {})
    loop = client._loop
    assert loop is not None
    (session,) = (each for key, each in loop.sessions.items() if key[0] == target)
    said = tmp_path / "said"
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(target, str(said)))
    child.start()
    child.join(180)
    assert child.exitcode == 0
    assert said.read_text() == "19 tools"
    assert len(client.list_tools(target, {})) == 19
    assert client._loop is loop and not session.retired, "the parent's child lives on"
