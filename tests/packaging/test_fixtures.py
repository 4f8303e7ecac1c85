"""The form of the tests: fixtures come from conftest.py, helpers from modules that hold no test."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@cache
def modules() -> dict[str, ast.Module]:
    """Parse the modules of the tests, by file: not on import, because every process collects this module."""
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}


def dotted(name: str) -> str:
    """Build the name under which a module of the tests is imported."""
    return "tests." + name.removesuffix(".py").replace("/", ".")


def is_private(name: str) -> bool:
    """Say whether a module of the tests, by its dotted name, is one that nobody imports."""
    return any(part == "conftest" or part.startswith("test_") for part in name.split(".")[1:])


def imported(tree: ast.Module) -> set[str]:
    """List what a module imports of the tests, at its top or inside a function, by dotted names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the tests import by full names"
            module = str(node.module)
            # A name is a module only in an import from a folder of the tests: `from tests.db import helpers`.
            folder = TESTS.parent.joinpath(*module.split(".")).is_dir()
            names |= {f"{module}.{alias.name}" for alias in node.names} if folder else {module}
    return {name for name in names if name.split(".")[0] == "tests"}


def test_no_module_imports_a_module_of_tests_or_a_conftest() -> None:
    """A fixture in a helper module would reach a test only through an import, which `__all__` keeps."""
    wrong = []
    for name, tree in modules().items():
        wrong += [f"{name}: imports {each}" for each in imported(tree) if is_private(each)]
        for node in ast.walk(tree):
            if is_private(dotted(name)):
                wrong += [name] if isinstance(node, ast.Name) and node.id == "__all__" else []
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorated = "fixture" in "".join(map(ast.unparse, node.decorator_list))
                wrong += [f"{name}: {node.name}"] * decorated
    assert wrong == []


def test_the_page_about_the_layout_names_every_folder_of_the_tests() -> None:
    layout = (TESTS.parent / "docs" / "layout.md").read_text().partition("\ntests/\n")[2]
    folders = {name.partition("/")[0] for name in modules() if "/" in name}
    assert {folder for folder in folders if f"{folder}/" not in layout} == set()
