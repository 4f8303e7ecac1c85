"""Judge what `make coverage` measured: exits with 1 where less was reached than is to be."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

from coverage import Coverage

LINES, BRANCHES = 95.0, 90.0  # per cent


def main() -> int:
    measured = Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(file))
        totals = json.loads(file.read_text())["totals"]
    lines = 100 * totals["covered_lines"] / totals["num_statements"]
    branches = 100 * totals["covered_branches"] / totals["num_branches"]
    print(f"lines {lines:.2f} % (at least {LINES}), branches {branches:.2f} % (at least {BRANCHES})")
    if lines >= LINES and branches >= BRANCHES:
        return 0
    table = io.StringIO()
    measured.report(file=table)
    print(table.getvalue())
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
