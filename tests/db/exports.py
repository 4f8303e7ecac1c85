"""Exports of runs: written, checked, sealed anew, and read into a database that knows nothing."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from agentruns import ToolContext, export_run, tool
from agentruns.models import Approval, Definition, Message, Notification, Run, Session, triggers
from agentruns.services.transfer import _written
from tests.programs import run_program
from tests.shop.agents import act

VERIFY = Path(__file__).resolve().parents[2] / "docs" / "verify_export.py"
Line = dict[str, Any]


@tool(name="report", safe_to_retry=True)
def report(ctx: ToolContext) -> str:
    """Return far more than a row should hold."""
    act("report", ctx)
    return "all of it " * 20_000


def forget_everything() -> None:
    """Let this be another database: one that knows nothing."""
    with triggers.lifted(connection), transaction.atomic():
        for model in (Notification, Approval, Message, Run, Session, Definition):
            model.objects.all().delete()


def sealed(lines: list[Line]) -> list[Line]:
    """Compute the hash of an export's lines anew."""
    rest = [line for line in lines if "end" not in line]
    return [*rest, {"end": hashlib.sha256(b"".join(map(_written, rest))).hexdigest()}]


def exported(run: Run, path: Path, **options: Any) -> list[Line]:
    """Export a run into a file, and give the lines of the file."""
    lines = list(export_run(run.pk, **options))
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return lines


def verified(path: Path) -> tuple[int, str]:
    """Check an export with docs/verify_export.py; give its exit code and what it printed."""
    done = run_program(sys.executable, "-I", str(VERIFY), str(path), code=None)
    return done.returncode, done.stdout + done.stderr
