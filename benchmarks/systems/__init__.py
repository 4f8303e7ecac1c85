"""One module per system. Each has VARIANTS, `prepare(variant, url)` and `run(workload)`, as `raw` shows.

One may have `ready(workload)`, too, for what comes before the clock runs.
"""

from __future__ import annotations

import ast
from pathlib import Path


def modules() -> dict[str, str]:
    """Return the module of every variant; nothing is imported, for a package may be missing."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(getattr(name, "id", "") == "VARIANTS" for name in names):
                found |= dict.fromkeys(ast.literal_eval(node.value), f"{__name__}.{path.stem}")
    return found
