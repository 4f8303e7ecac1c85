"""The form of the package: short, named by nouns, nothing written twice. Import layers are `make check`'s."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentruns"
LAYOUT = (ROOT / "docs" / "layout.md").read_text()
MODULES = {
    str(path.relative_to(PACKAGE)): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if "migrations" not in path.parts  # written by Django
}
SAME = 10  # lines


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in MODULES.items()}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Find the nodes of these kinds, each with its module."""
    for name, tree in trees().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kinds))


def test_modules_and_functions_are_short_named_by_nouns_and_the_root_is_small() -> None:
    assert not [name for name, source in MODULES.items() if source.count("\n") >= 600]
    functions = nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    assert not [(name, one.name) for name, one in functions if one.end_lineno - one.lineno >= 80]
    folders = {name.partition("/")[0] for name in MODULES if "/" in name}
    assert len(folders - {"templatetags"}) <= 14
    assert len([name for name in MODULES if "/" not in name]) <= 9
    documented = nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert not [name for name, node in documented if VAGUE.match(ast.get_docstring(node) or "")]


VAGUE = re.compile(r"(What|Who|Whose|Whether|How|Return (what|that|those|whose|who|whether))\b")


def test_doors_start_runs_by_the_service_that_asks_who_may() -> None:
    """A program may start anything for anybody, a person may not: no door of people takes its services."""
    starting = "start_run|run_agent|get_or_start|submit|fork_run|run_again|send_message|send"
    services = [f"agentruns.services.runs.{name}" for name in ("lifecycle", "submit", "messages", "forks")]
    called = re.compile(rf"\b(?:agentruns|lifecycle|submit|messages|forks)\.(?:{starting})\b")
    doors = {name for name in MODULES if name.startswith(("admin/", "api/"))}
    found = [(name, called.findall(MODULES[name])) for name in doors]
    for name, node in nodes(ast.ImportFrom):
        if name in doors and node.module in ("agentruns", *services):
            found.append((name, [alias.name for alias in node.names if re.fullmatch(starting, alias.name)]))
    assert not [each for each in found if each[1]]


def test_only_the_module_of_tool_calls_enters_handlers() -> None:
    entering = re.compile(r"\bhandler\.(?:enter|run_transactional)\b")
    assert [name for name, source in MODULES.items() if entering.search(source)] == ["engine/tool_calls.py"]
    assert [name for name, source in MODULES.items() if ".invoke(" in source] == ["engine/handler.py"]


def test_this_machines_clock_is_read_in_named_places_only() -> None:
    """It may be slow or fast: what is stored is timed by the database, and intervals by `uptime`."""
    found = {(name, ast.unparse(call.func)) for name, call in nodes(ast.Call) if _reads_wall_clock(call)}
    assert found == {
        ("utils/clock.py", "datetime.now"),  # of stateless runs, and of SQLite, whose clock it is
        ("utils/ids.py", "time.time_ns"),  # ids only sort by it; the console gives them a day
        ("testing/database.py", "datetime.now"),  # where a frozen clock begins
    }


def _reads_wall_clock(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in ("localdate", "localtime", "time_ns")
    if not isinstance(call.func, ast.Attribute):
        return False
    of, name = ast.unparse(call.func.value).rpartition(".")[2], call.func.attr
    if of == "timezone":
        return name == "now" or (name in ("localtime", "localdate") and not call.args)
    if of in ("datetime", "date"):
        return name in ("now", "utcnow", "today")
    # Django's own DateTimeField asks this machine.
    by_itself = (
        of == "models"
        and name == "DateTimeField"
        and any((option.arg or "").startswith("auto_now") for option in call.keywords)
    )
    return by_itself or (of == "time" and name in ("time", "time_ns", "localtime", "gmtime", "strftime"))


def test_no_modules_import_each_other_in_a_circle_not_even_models_and_agents_for_annotations() -> None:
    """Imports under TYPE_CHECKING count. `Agent.run` calls the package's lazy names: the one way upwards."""
    graph = grimp.build_graph("agentruns", exclude_type_checking_imports=False, cache_dir=None)
    graph.remove_import(importer="agentruns.agents.agent", imported="agentruns")
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()
    # Agents name `Run` in an annotation.
    assert not graph.find_shortest_chains("agentruns.models", "agentruns.agents", as_packages=True)


def files_of(target: str) -> set[str]:
    """Return the files of tests that a target of the Makefile runs."""
    told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/test_*.py")}
    found = set()
    for line in told.replace("\\\n", "").splitlines():
        if "pytest" in line:
            left_out = re.findall(r"--(?:ignore|deselect)=(\S+)", line)
            named = re.findall(r" (tests/[\w/.]+)", line) or ["tests"]
            assert all((ROOT / path.partition("::")[0]).exists() for path in [*named, *left_out])
            run = {file for file in files if file.startswith(tuple(named))}
            found |= {file for file in run if not file.startswith(tuple(left_out))}
    return found


def test_make_test_runs_each_file_of_tests_or_leaves_it_to_make_test_full() -> None:
    everything = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/test_*.py")}
    rest = everything - files_of("test")
    assert rest <= files_of("test-full")
    long = {
        "api": "schemathesis", "crash": "soak", "db": "closing export_mutations mixed_replies odd_results",
        "packaging": "docs_tutorial plugin wheel", "workers": "deploys soak",
    }  # fmt: skip
    assert rest == {f"tests/{at}/test_{name}.py" for at, names in long.items() for name in names.split()}


def test_nothing_is_written_twice() -> None:
    """Whatever its indentation; imports, brackets and tables of names do not count."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, source in MODULES.items():
        told = [line for line in map(str.strip, source.splitlines()) if re.search(r"\w\w", line)]
        code = [line for line in told if not re.match(r"from |import |#", line)]
        for place in range(len(code) - SAME + 1):
            block = code[place : place + SAME]
            if not all(re.match(r"[\w.]+: ", line) for line in block):
                found[tuple(block)].add(f"{name}, the block of {block[0]!r}")
    assert not [sorted(places) for places in found.values() if len(places) > 1]


def test_the_layout_names_every_module_and_nothing_that_is_not_there() -> None:
    """One of agentruns/ by its name, one of a folder by the folder's."""
    listed = LAYOUT.split("\nagentruns/ ")[1].split("\nproject/ ")[0]
    words = set(re.findall(r"[\w/.]+", listed))
    firsts = {f"{name.partition('/')[0]}/" if "/" in name else name for name in MODULES}
    assert not firsts - words
    for line in listed.splitlines()[1:]:
        names = re.match(r"  (\S+(?: [\w.]+\.py)*(?: \w+/)*)  ?", line)
        for name in names[1].split() if names else ():
            if name.endswith((".py", "/")):
                assert (PACKAGE / name).exists(), name
