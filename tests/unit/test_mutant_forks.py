"""The runner of `make mutants`: forks that know nothing of one another, and a verdict for each mutant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import SQLITE, forkserver
from tests.mutants.__main__ import ALL, FAILED, Copy
from tests.waiting import wait_for

LONG = 3600  # seconds


class Server:
    """A fork server whose folder is a project of one test module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", forkserver.__file__, "pytest"],
            cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, code: str, patience: float = LONG, **environment: str) -> None:
        """Let a fork run a test module with this code."""
        assert self.process.stdin is not None
        (self.folder / "test_it.py").write_text(code)
        request: forkserver.Request = {
            "arguments": ["-p", "no:cacheprovider", "test_it.py"],
            "environment": self.environment | environment,
            "output": str(self.folder / "output"),
            "patience": patience,
        }
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for the exit code."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    server = Server(tmp_path)
    with server.process:
        yield server
        with suppress(ValueError):
            server.process.communicate()


def test_the_exit_code_of_a_fork_is_that_of_a_new_interpreter(server: Server) -> None:
    """No module and no variable of the fork before is there."""
    for code, expected in {
        "def test_it(): pass": 0,
        "def test_it(): assert False": 1,
        "import nothing_of_this_name": 2,
        "import os\ndef test_it(): os.kill(os.getpid(), 9)": -9,
        "import os\ndef test_it(): os._exit(7)": 7,
    }.items():
        server.ask(code)
        assert server.answer() == expected, code
    server.ask("import time\ndef test_it(): time.sleep(3600)", patience=0.1)
    assert server.answer() is None, "tests that hang are killed"
    code = "import os, guard\ndef test_it(): assert guard.VALUE == 1 and os.environ['GIVEN'] == '1'"
    for value, given, expected in (("1", {"GIVEN": "1"}, 0), ("1", {}, 1), ("1 + 1", {"GIVEN": "1"}, 1)):
        (server.folder / "guard.py").write_text(f"VALUE = {value}")
        server.ask(code, **given)
        assert server.answer() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another process")
@pytest.mark.parametrize("after", ["; time.sleep(3600)", ""])
def test_no_descendant_outlives_the_tests(server: Server, after: str) -> None:
    """Also one that left the process group, whether its parent is killed or ends."""
    server.ask(
        "import subprocess, sys, time, pathlib\n"
        "def test_it():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
        " start_new_session=True)\n"
        "    pathlib.Path('new').write_text(str(child.pid)); pathlib.Path('new').rename('pid')" + after
    )
    wait_for((server.folder / "pid").exists, "the test's child")
    server.process.communicate()  # whoever asked has gone
    with pytest.raises(ProcessLookupError):
        os.kill(int((server.folder / "pid").read_text()), 0)


def test_a_mutant_falls_and_what_breaks_nothing_or_everything_survives(tmp_path: Path) -> None:
    mutant = next(
        one for one in ALL
        if one.database == SQLITE and len(one.edits) == len(one.tests) == 1 and one.tests[0].startswith("db/")
    )  # fmt: skip
    [edit] = mutant.edits
    harmless = replace(mutant, edits=(replace(edit, new=edit.old),))
    broken = replace(mutant, edits=(replace(edit, new="(\n"),))  # no Python, in a string neither
    with Copy(tmp_path, 0, {SQLITE: {"AGENTRUNS_TEST_DATABASE": "sqlite"}}) as copy:
        assert copy.try_out(harmless).startswith("still passing")
        assert copy.try_out(mutant) == ""
        assert FAILED in copy.try_out(broken)
        assert copy.try_out(harmless).startswith("still passing")
