"""Journals as the code of a commit writes them: `python -m tests.releases.record [COMMIT]`.

Without COMMIT it is the last one. `--anew` drops the journals of other commits: only before the first
release, because those of a release must be readable for ever.

Of each run, fixtures/releases/COMMIT has its export as `<name>.jsonl`, and the rows beside the journal as a
line of `tables.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.releases.old import ROOT, environment

RECORDED = ROOT / "fixtures" / "releases"


def main() -> None:
    """Run this module with the code of a commit in the place of this one's."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases.record")
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--anew", action="store_true", help="drop the journals of other commits")
    given = parser.parse_args()
    words = ["git", "rev-parse", "--short=7", f"{given.commit}^{{commit}}"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    shutil.rmtree(RECORDED if given.anew else RECORDED / commit, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        files = {"AGENTRUNS_TEST_DB_NAME": f"{folder}/db.sqlite3", "AGENTRUNS_EFFECTS": f"{folder}/effects"}
        words = [sys.executable, "-P", "-m", "tests.releases.record", "--here", str(RECORDED / commit)]
        subprocess.run(words, env=environment(commit, Path(folder) / "old", **files), cwd=folder, check=True)


def record(folder: Path) -> None:
    """Live through every shape a run can have, and write each down as it is then."""
    import django
    from django.core.management import call_command

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    call_command("migrate", verbosity=0)
    from tests.releases import stories

    folder.mkdir(parents=True, exist_ok=True)
    tables: list[str] = []

    def write(name: str) -> Callable[[Any], None]:
        def down(run: Any) -> None:
            lines = [json.dumps(line) + "\n" for line in stories.exported(run)]
            (folder / f"{name}.jsonl").write_text("".join(lines))
            tables.append(json.dumps({"name": name, **stories.tables(run)}, default=str) + "\n")

        return down

    for name, story in stories.all_of_them().items():
        story(write(name))
    (folder / "tables.jsonl").write_text("".join(tables))


if __name__ == "__main__":
    record(Path(sys.argv[2])) if sys.argv[1:2] == ["--here"] else main()
