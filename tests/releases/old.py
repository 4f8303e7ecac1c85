"""The code of an older release in a process of its own, which does one thing for each line it reads."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class NoSuchCommitError(Exception):
    """Git does not have the code of an older release."""


def environment(commit: str, folder: Path, **more: str) -> dict[str, str]:
    """Put the code of a commit into a folder; return the variables with which Python runs it."""
    command = ["git", "archive", "--format=zip", commit, "agentruns"]
    try:
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NoSuchCommitError(f"git does not have commit {commit} here: {error}") from error
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **more}


def main() -> None:
    """Answer each line, [verb, argument ...], by one line."""
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    import agentruns
    from agentruns import start_run
    from agentruns.journal.verify import problems
    from agentruns.models import Run
    from agentruns.services.sweep import sweep
    from tests.releases import agents

    declared = agents.declare()

    def started(name: str, key: str) -> str:
        return str(start_run(declared[name], "Refund A1", key, idempotency_key=key).pk)

    def swept() -> dict[str, str]:
        sweep()
        return dict(Run.objects.values_list("session__key", "status"))

    def wrong() -> list[str]:
        sessions = Run.objects.order_by("session").values_list("session", flat=True).distinct()
        return [each for session in sessions for each in problems(session)]

    does: dict[str, Any] = {"start": started, "sweep": swept, "problems": wrong}
    print(json.dumps(str(agentruns.__file__)), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(does[verb](*arguments)), flush=True)


if __name__ == "__main__":
    main()
