"""Apply one mutant after the other to copies of the tree, and run the tests that must fall."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import cache_from_source
from pathlib import Path

from tests import scratch
from tests.mutants import POSTGRESQL, SQLITE, Edit, Mutant, content, engine, journal, providers, services
from tests.servers import postgres

ROOT = Path(__file__).parents[2]
COPIED = ("agentruns", "fixtures", "project", "templates", "tests", "pyproject.toml", "manage.py")
COPIES = 2  # at work at a time
LIGHT = ("-p", "no:hypothesispytest", "-p", "no:xdist")  # a second less for each mutant
FAILED = "the tests could not be run"
PATIENCE = 180  # seconds for the tests of one mutant; a test that hangs does not count as fallen
ALL = [*journal.MUTANTS, *engine.MUTANTS, *services.MUTANTS, *content.MUTANTS, *providers.MUTANTS]


class Copy:
    """A copy of the tree, with databases of its own."""

    def __init__(self, folder: Path, number: int, servers: dict[str, dict[str, str]]) -> None:
        self.folder = folder / str(number)
        self.number = number
        self.servers = servers
        self.folder.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name)
            else:
                shutil.copy(ROOT / name, self.folder / name)

    def fallen(self, database: str, tests: Iterable[str], *options: str) -> tuple[set[str], str]:
        """Run tests; return those that fell, without their parameters, and all that pytest says."""
        environment = os.environ | self.servers[database] | {
            "PYTHONPATH": str(self.folder),
            "AGENTRUNS_TEST_NAME": f"mutant_{self.number}",
        }  # fmt: skip
        environment.pop("AGENTRUNS_TEST_BRIEF", None)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rf",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            *LIGHT,
        ]
        done = subprocess.run(
            [*command, *options, *(f"tests/{test}" for test in tests)],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1):  # a test that is not there, or code that cannot be imported
            return set(), f"{FAILED}:\n{done.stdout}{done.stderr}"
        return set(re.findall(r"^FAILED tests/([^\s\[]+)", done.stdout, re.MULTILINE)), done.stdout

    def try_out(self, mutant: Mutant) -> str:
        """Apply a mutant, run its tests and undo it; return "" if all of them fell, else what happened."""
        try:
            for edit in mutant.edits:
                self.write(edit.file, mutated(edit, (self.folder / "agentruns" / edit.file).read_text()))
            options = ["-x"] if len(mutant.tests) == 1 else []  # one case of it is enough
            fallen, said = self.fallen(mutant.database, mutant.tests, *options)
        except subprocess.TimeoutExpired:
            return f"its tests did not end within {PATIENCE} s"
        finally:
            for edit in mutant.edits:
                self.write(edit.file, (ROOT / "agentruns" / edit.file).read_text())
        standing = {test.partition("[")[0] for test in mutant.tests} - fallen
        return f"still passing: {', '.join(sorted(standing))}\n{said}" if standing else ""

    def write(self, file: str, text: str) -> None:
        """Write a module; what was compiled from it may be of the same second and size."""
        path = self.folder / "agentruns" / file
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def mutated(edit: Edit, text: str) -> str:
    """Return the text of a file with an edit made."""
    if (found := text.count(edit.old)) != 1:
        raise LookupError(f"agentruns/{edit.file} has this text {found} times, not once:\n{edit.old}")
    return text.replace(edit.old, edit.new)


def inapplicable(mutants: Iterable[Mutant]) -> list[str]:
    """Return what is wrong with the list as the code is now."""
    wrong = []
    for mutant in mutants:
        for edit in mutant.edits:
            try:
                mutated(edit, (ROOT / "agentruns" / edit.file).read_text())
            except (LookupError, OSError) as error:
                wrong.append(f"{mutant.guard}: {error}")
    return wrong


def work(copies: list[Copy], jobs: Iterable[Mutant]) -> dict[str, str]:
    """Try the mutants out, each copy one at a time; return what survived, and why."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    survived: dict[str, str] = {}
    for job in jobs:
        waiting.put(job)

    def drain(copy: Copy) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            said = copy.try_out(mutant)
            if said:
                survived[mutant.guard] = said
            word, took = "SURVIVED" if said else "fell", time.monotonic() - began
            print(f"{word:8}  {took:4.0f} s  {mutant.database:10}  {mutant.guard}", flush=True)

    threads = [threading.Thread(target=drain, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return survived


def without_mutants(copies: list[Copy], mutants: list[Mutant]) -> str:
    """Run all the tests on the tree as it is: what falls there, too, would prove nothing."""
    tests: dict[str, list[str]] = {}
    for mutant in mutants:
        tests.setdefault(mutant.database, []).extend(mutant.tests)
    with ThreadPoolExecutor() as pool:
        done = pool.map(lambda copy, of: copy.fallen(of, sorted({*tests[of]})), copies, tests)
        for database, (fallen, said) in zip(tests, done, strict=True):
            if fallen or FAILED in said:
                return f"Without any mutant, on {database}:\n{said}"
    return ""


def main(words: list[str]) -> int:
    mutants = [one for one in ALL if all(word.lower() in one.guard.lower() for word in words)]
    wrong = inapplicable(mutants)
    if wrong or not mutants:
        print("\n\n".join(wrong) or "No guard has these words.")
        return 1
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-", dir=scratch.folder()))
        )
        servers: dict[str, dict[str, str]] = {SQLITE: {"AGENTRUNS_TEST_DATABASE": "sqlite"}}
        if any(mutant.database == POSTGRESQL for mutant in mutants):
            servers[POSTGRESQL] = stack.enter_context(postgres()).environment
        copies = [Copy(folder, number, servers) for number in range(COPIES)]
        if wrong := without_mutants(copies, mutants):
            print(wrong)
            return 1
        survived = work(copies, sorted(mutants, key=lambda one: one.database))
    for guard, said in survived.items():
        print(f"\n--- {guard}: {said}")
    print(f"\n{len(mutants) - len(survived)} of {len(mutants)} mutants fell.")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
