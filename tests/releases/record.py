"""Records the journals of fixtures/releases, run by the code of an older release in the place of this one:

git archive <commit> agentruns | tar -x -C old
PYTHONPATH=old:. AGENTRUNS_TEST_DB_NAME=old/db.sqlite3 AGENTRUNS_EFFECTS=old/effects \
    python -P -m tests.releases.record fixtures/releases/<commit> [name ...]

Of each run `<name>.jsonl` is its export, and a line of `tables.jsonl` what is stored beside the journal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(folder: Path, *names: str) -> None:
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
        if not names or name in names:
            story(write(name))
    (folder / "tables.jsonl").write_text("".join(tables))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
