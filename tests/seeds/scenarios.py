"""What the seed systems test (B), where they break (D), and the tests of ours that show it, or why none does.

`python -m tests.seeds.scenarios > docs/reference/scenarios.md` writes the page.
"""

from __future__ import annotations

from tests.seeds.answers_b1 import B1
from tests.seeds.answers_b2 import B2
from tests.seeds.answers_dr import DR, DS
from tests.seeds.answers_dv import DE, DV
from tests.seeds.table import Shown, cell

GROUPS: dict[str, tuple[str, dict[str, tuple[str, Shown]]]] = {
    "B1": ("What vertz tests", B1),
    "B2": ("What reactive-agents tests", B2),
    "D-V": ("Where vertz breaks", DV),
    "D-R": ("Where reactive-agents breaks", DR),
    "D-E": ("Where the essays' own sketches break", DE),
    "D-S": ("What to hold against all of them", DS),
}
SCENARIOS: dict[str, tuple[str, Shown]] = {
    name: entry for _, entries in GROUPS.values() for name, entry in entries.items()
}

HEAD = """\
# What the seed systems test and where they break, and what shows how agentruns does

Written by `python -m tests.seeds.scenarios > docs/reference/scenarios.md`; do not edit it.

{total} scenarios: {tested} are shown by tests, {unshown} have a reason instead. "Ours differs" says where
agentruns behaves in another way than the scenario expects.
"""


def page() -> str:
    """Return the page of the scenarios."""
    tested = sum(bool(shown.tests) for _, shown in SCENARIOS.values())
    figures = {"total": len(SCENARIOS), "tested": tested, "unshown": len(SCENARIOS) - tested}
    lines = [HEAD.format(**figures)]
    for title, entries in GROUPS.values():
        lines += [f"## {title}", "", "| | scenario | shown by |", "|---|---|---|"]
        lines += [f"| {name} | {text} | {cell(shown)} |" for name, (text, shown) in entries.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
