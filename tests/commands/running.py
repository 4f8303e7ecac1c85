"""Running a command as a test sees it: what it printed, and its exit code."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

from django.core.management import CommandError, call_command


@dataclass
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """The output, one JSON value a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def run(*command: str) -> Outcome:
    """Run a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        call_command(*command, stdout=out, stderr=err)
    except CommandError as error:
        code = error.returncode
        err.write(str(error))
    except SystemExit as error:
        code = int(error.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())
