"""Files and functions of agentruns that the three ways enter: a tool call, an approval click, `POST /runs`.

`python -m benchmarks.ways` prints a table; `--files` names them, with their functions. A profile counts one
request each, after one that is not counted: imports, caches and connections are made by then.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "agentruns") + os.sep


class Entered:
    """Functions of the package entered while it is on, in every thread, and calls from file to file."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.crossings = 0

    def __enter__(self) -> Entered:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        self.crossings += caller is not None and caller.f_code.co_filename != code.co_filename

    def files(self) -> dict[str, list[str]]:
        """Return the entered functions by file."""
        found: dict[str, list[str]] = defaultdict(list)
        for code in self.functions:
            found[code.co_filename.removeprefix(PACKAGE)].append(code.co_qualname)
        return {name: sorted(found[name]) for name in sorted(found)}


def ways() -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return for each way a function that prepares its nth try and returns what is to be counted."""
    from django.contrib.auth import get_user_model
    from django.test import Client
    from django.urls import reverse

    from agentruns import Agent, run_agent, tool
    from agentruns.testing import ScriptedModel

    def refund(order: str, cents: int) -> str:
        """Refund an order."""
        return f"{cents} cents of {order} refunded"

    script = [{"tools": [{"name": "refund", "input": {"order": "A1", "cents": 500}}]}, {"text": "Done."}]
    for name, asks in (("plain", False), ("asking", True)):
        tools = [tool(requires_approval=asks)(refund)]
        Agent(name, instructions="Help.", tools=tools, model=ScriptedModel(script))
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("clerk"))

    def tool_call(number: int) -> Callable[[], object]:
        return lambda: run_agent("plain", "Refund A1", f"call-{number}")

    def click(number: int) -> Callable[[], object]:
        [card] = run_agent("asking", "Refund A1", f"click-{number}").pending
        url = reverse("admin:agentruns_approval_approve", args=[card.pk])
        return lambda: client.post(url, {"digest": card.digest})

    def start(number: int) -> Callable[[], object]:
        body = {"agent": "plain", "input": "Refund A1", "session": f"post-{number}"}
        return lambda: client.post("/api/runs", body, content_type="application/json")

    return {"tool call": tool_call, "approval click": click, "POST /runs": start}


def count() -> dict[str, Entered]:
    """Return what each way enters, on a new SQLite database."""
    import django
    from django.test.utils import setup_databases, setup_test_environment, teardown_databases

    django.setup()
    setup_test_environment()
    databases = setup_databases(verbosity=0, interactive=False)
    try:
        found = {}
        for name, prepare in ways().items():
            prepare(0)()
            counted = prepare(1)
            with Entered() as found[name]:
                counted()
        return found
    finally:
        teardown_databases(databases, verbosity=0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="name the files and functions")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    print(f"{'way':<16}{'files':>8}{'functions':>11}{'calls across files':>20}")
    for name, entered in count().items():
        files = entered.files()
        print(f"{name:<16}{len(files):>8}{len(entered.functions):>11}{entered.crossings:>20}")
        if options.files:
            for file, functions in files.items():
                print(f"    {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
