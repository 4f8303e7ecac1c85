"""Run pytest in forks of a process that has imported what no mutant changes.

A script, which knows nothing of this project: its arguments name the modules to import. Each line of its
standard input is a request in JSON (`Request`); it answers with pytest's exit code, or with `null` for tests
that had to be killed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TypedDict

PR_SET_CHILD_SUBREAPER = 36
CHILDREN = Path("/proc/self/task") / str(os.getpid()) / "children"  # of Linux only
BETWEEN_LOOKS = 0.02  # seconds


class Request(TypedDict):
    """One run of pytest."""

    arguments: list[str]
    environment: dict[str, str]  # all of it
    output: str  # the file for what the tests print
    patience: float  # seconds until the tests are killed


def perform(request: Request) -> int:
    """Run pytest in this process, a new fork, as a new interpreter would run it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # so that TMPDIR is read anew
    sys.argv = ["pytest", *request["arguments"]]
    import pytest

    return int(pytest.main(request["arguments"]))


def end(code: int) -> None:
    """End this process as an interpreter ends, but leave the memory to the kernel."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def fork(request: Request) -> int | None:
    """Run pytest in a fork; find its exit code, or None if it had to be killed."""
    if threading.active_count() != 1:
        raise RuntimeError(f"A fork would lose threads: {threading.enumerate()}")
    child = os.fork()
    if not child:
        code = 3  # pytest's own for an internal error
        try:
            os.setpgid(0, 0)
            code = perform(request)
        except BaseException:
            traceback.print_exc()
        finally:
            end(code)
    with suppress(OSError):  # the fork has done so, or has ended
        os.setpgid(child, child)
    try:
        return wait(child, time.monotonic() + request["patience"])  # waits: a mutant that hangs survives
    finally:
        kill_all(child)


def wait(child: int, until: float) -> int | None:
    """Wait for the exit code of a process, as `subprocess` has it; None if it does not end in time."""
    while time.monotonic() < until:  # waits: the same
        process, status = os.waitpid(-1, os.WNOHANG)  # orphans of the tests are children of this process, too
        if process == child:
            return os.waitstatus_to_exitcode(status)
        if not process and select.select([sys.stdin], [], [], BETWEEN_LOOKS)[0]:
            break  # whoever asked has gone
    return None


def kill_all(group: int) -> None:
    """Kill a process group and every descendant that left the group: an orphan is a child of this process."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(group, 0)
    while CHILDREN.exists() and (left := CHILDREN.read_text().split()):
        for process in map(int, left):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def main(modules: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all the memory
    answers = os.fdopen(os.dup(1), "w")
    with suppress(BrokenPipeError):  # whoever asked has gone
        while line := sys.stdin.readline():
            print(json.dumps(fork(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
