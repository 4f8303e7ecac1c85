"""Apply one mutant after the other to copies of the tree, and run the tests that must fall."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import cache_from_source
from pathlib import Path
from typing import TypeVar

from tests import scratch
from tests.mutants import (
    POSTGRESQL,
    SQLITE,
    Edit,
    Mutant,
    changes,
    content,
    engine,
    forkserver,
    holds,
    journal,
    providers,
    rules,
    services,
)
from tests.mutants.plugin import VARIABLE
from tests.servers import postgres

Job = TypeVar("Job")

ROOT = Path(__file__).parents[2]
COPIED = ("agentruns", "docs", "fixtures", "project", "templates", "tests", "pyproject.toml", "manage.py")
COPIES = 5  # at work at a time; more than the cores of a small machine, because the longest tests wait
# What the tests import of others, as far as it needs no settings. Celery is missing: a system check asks
# whether the process has imported Celery.
IMPORTED = (
    "pytest", "pytest_django.plugin", "pytest_randomly", "time_machine", "typeguard._pytest_plugin",
    "xdist.looponfail", "hypothesis.stateful", "django.contrib.admin", "django.contrib.sessions.backends.db",
    "django.core.management.commands.migrate", "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base", "django.template.backends.jinja2", "django.test", "django_tasks",
    "anthropic", "cryptography", "jsonschema", "markdown_it", "mcp", "nh3", "openai",
    "opentelemetry.sdk.metrics", "opentelemetry.sdk.trace", "pydantic.v1",
)  # fmt: skip
OPTIONS = (
    *("-q", "-rf", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"),
    *("--assert=plain", "-p", "no:hypothesispytest", "-p", "no:xdist"),  # quicker
)
TOGETHER = 25  # tests in one run without mutants
# Begun first, so that no copy works on one of them alone at the end.
SLOW = (
    "crash/", "db/test_drafts", "db/test_executor", "db/test_hard_cases", "db/test_journal",
    "db/test_late_evidence", "db/test_leases", "failover/", "mcp/", "providers/test_forks",
)  # fmt: skip
SCHEMA = ("apps.py", "conf.py", "migrations/", "models/", "utils/")  # what migrations import
FAILED = "the tests could not be run"
PATIENCE = 180  # seconds for the tests of one mutant; a test that hangs does not count as fallen
DEFINITIONS = (journal, engine, holds, rules, services, content, providers)
ALL = [mutant for module in DEFINITIONS for mutant in module.MUTANTS]


class Copy:
    """A copy of the tree, with databases of its own, and a process whose forks run its tests."""

    def __init__(self, folder: Path, number: int, servers: dict[str, dict[str, str]]) -> None:
        self.folder = folder / str(number)
        self.servers = servers
        self.runs = 0
        self.folder.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name)
            else:
                shutil.copy(ROOT / name, self.folder / name)
        self.environment = os.environ | {"PYTHONPATH": str(self.folder)}
        for variable in ("AGENTRUNS_TEST_BRIEF", "PYTHONDONTWRITEBYTECODE"):
            self.environment.pop(variable, None)
        self.forks = subprocess.Popen(
            [sys.executable, "-P", forkserver.__file__, *IMPORTED],
            cwd=self.folder, env=self.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *exception: object) -> None:
        with self.forks:  # the end of its input is its end
            pass

    def fallen(
        self,
        database: str,
        tests: Iterable[str],
        *options: str,
        fresh: bool = False,
        patience: float = PATIENCE,
    ) -> tuple[set[str], str]:
        """Run tests; find the failed ones, without their parameters, and pytest's output.

        With `fresh` the databases are migrated instead of copied. Raises TimeoutError after `patience`.
        """
        self.runs += 1
        temporary = self.folder.with_name(f"{self.folder.name}_{self.runs}")
        temporary.mkdir()
        name = f"{self.folder.parent.name}_{temporary.name}"
        environment = self.environment | self.servers[database] | {
            "AGENTRUNS_TEST_NAME": name,
            "AGENTRUNS_TEST_LIMIT": "45",  # seconds; without a mutant all tests passed within them
            "TMPDIR": str(temporary),
        }  # fmt: skip
        if not fresh:
            environment[VARIABLE] = str(self.folder.with_name(f"{database}_{self.folder.name}"))
        request: forkserver.Request = {
            "arguments": [*OPTIONS, *options, *(f"tests/{test}" for test in tests)],
            "environment": environment,
            "output": str(temporary / "output"),
            "patience": patience,
        }
        code = self.ask(request)
        said = (temporary / "output").read_text(errors="replace")
        shutil.rmtree(temporary, ignore_errors=True)
        for file in Path(scratch.folder()).glob(f"agentruns-*-{name}*"):
            file.unlink()  # of tests that were killed
        if code is None:
            raise TimeoutError
        failed = set(re.findall(r"^FAILED tests/([^\s\[]+)", said, re.MULTILINE))
        if code not in (0, 1) and not failed:  # a test that is not there, or code that cannot be imported
            return failed, f"{FAILED}:\n{said}"
        return failed, said

    def ask(self, request: forkserver.Request) -> int | None:
        """Let a fork run pytest; return its exit code, or None if it had to be killed."""
        assert self.forks.stdin is not None and self.forks.stdout is not None
        print(json.dumps(request), file=self.forks.stdin, flush=True)
        return json.loads(self.forks.stdout.readline())

    def try_out(self, mutant: Mutant) -> str:
        """Apply a mutant, run its tests and undo it; return "" if all of them fell, else what happened."""
        fresh = any(edit.file.startswith(SCHEMA) for edit in mutant.edits)
        originals = {edit.file: (self.folder / "agentruns" / edit.file).read_text() for edit in mutant.edits}
        try:
            for edit in mutant.edits:
                self.write(edit.file, mutated(edit, (self.folder / "agentruns" / edit.file).read_text()))
            options = ["-x"] if len(mutant.tests) == 1 else []  # one case of it is enough
            fallen, said = self.fallen(mutant.database, mutant.tests, *options, fresh=fresh)
        except TimeoutError:
            return f"its tests did not end within {PATIENCE} s"
        finally:
            for file, text in originals.items():
                self.write(file, text)
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


def deal(copies: list[Copy], jobs: Iterable[Job], perform: Callable[[Copy, Job], None]) -> None:
    """Perform the jobs, one at a time on each copy."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def drain(copy: Copy) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            perform(copy, job)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(drain, copies))  # raises what one of them raised


def work(copies: list[Copy], mutants: Iterable[Mutant]) -> dict[str, str]:
    """Try the mutants out; return what survived, and why."""
    survived: dict[str, str] = {}

    def judge(copy: Copy, mutant: Mutant) -> None:
        began = time.monotonic()  # waits: for nothing; it is printed
        said = copy.try_out(mutant)
        if said:
            survived[mutant.guard] = said
        word, took = "SURVIVED" if said else "fell", time.monotonic() - began  # waits: the same
        print(f"{word:8}  {took:4.0f} s  {mutant.database:10}  {mutant.guard}", flush=True)

    deal(copies, mutants, judge)
    return survived


def without_mutants(copies: list[Copy], mutants: list[Mutant]) -> str:
    """Run all the tests on the tree as it is: what falls there, too, would prove nothing."""
    wrong = []
    jobs = []
    for database in (SQLITE, POSTGRESQL):
        tests = sorted({test for one in mutants if one.database == database for test in one.tests})
        jobs += [(database, tests[start : start + TOGETHER]) for start in range(0, len(tests), TOGETHER)]

    def run(copy: Copy, job: tuple[str, list[str]]) -> None:
        try:
            fallen, said = copy.fallen(*job, patience=PATIENCE * len(job[1]))
        except TimeoutError:
            fallen, said = set(), f"{FAILED}, they hang: {' '.join(job[1])}"
        if fallen or FAILED in said:
            wrong.append(f"Without any mutant, on {job[0]}:\n{said}")

    deal(copies, jobs, run)
    return "\n".join(wrong)


def main(words: list[str]) -> int:
    """Run the mutants whose guard has all the words; with `--changed`, those that a change concerns."""
    mutants = ALL
    if "--changed" in words:
        words = [word for word in words if word != "--changed"]
        files = [Path(str(module.__file__)).relative_to(ROOT).as_posix() for module in DEFINITIONS]
        mutants, reason = changes.affected(ROOT, ALL, files)
        print(f"{len(mutants)} of {len(ALL)} mutants: {reason}.", flush=True)
        if not mutants:
            return 0
    mutants = [one for one in mutants if all(word.lower() in one.guard.lower() for word in words)]
    wrong = inapplicable(mutants)
    if wrong or not mutants:
        print("\n\n".join(wrong) or "No guard has these words.")
        return 1
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants_", dir=scratch.folder()))
        )
        servers: dict[str, dict[str, str]] = {SQLITE: {"AGENTRUNS_TEST_DATABASE": "sqlite"}}
        if any(mutant.database == POSTGRESQL for mutant in mutants):
            servers[POSTGRESQL] = stack.enter_context(postgres()).environment
        copies = [stack.enter_context(Copy(folder, number, servers)) for number in range(COPIES)]
        if wrong := without_mutants(copies, mutants):
            print(wrong)
            return 1
        survived = work(copies, sorted(mutants, key=lambda one: not one.tests[0].startswith(SLOW)))
    for guard, said in survived.items():
        print(f"\n--- {guard}: {said}")
    print(f"\n{len(mutants) - len(survived)} of {len(mutants)} mutants fell.")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
