"""The texts of the package that are translated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "agentruns"
CALLS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "ngettext": 2, "ngettext_lazy": 2}  # by how many texts
Texts = tuple[str, ...]  # one, or singular and plural


def called(tree: ast.AST) -> Iterator[tuple[ast.Call, Texts]]:
    """Find each call of gettext, and what it is asked to translate."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            texts = [one.value for one in node.args[: CALLS[node.func.id]] if isinstance(one, ast.Constant)]
            yield node, tuple(texts)


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    """List the modules that translate something."""
    texts = [(path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(path, ast.parse(text)) for path, text in texts if "gettext" in text]


def templates() -> Iterator[tuple[Path, str]]:
    for path in sorted((PACKAGE / "templates").rglob("*.html")):
        yield path, path.read_text()
