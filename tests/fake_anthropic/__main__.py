"""`python -m tests.fake_anthropic script.json`: the fake for programs in any language."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

from tests.fake_anthropic import FakeAnthropic


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_anthropic")
    parser.add_argument("script", type=Path, help="a list of turns, or an object with turns and faults")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, help="gets every call as a line of JSON")
    given = parser.parse_args()
    value = json.loads(given.script.read_text(encoding="utf-8"))
    turns, faults = (value["turns"], value.get("faults")) if isinstance(value, dict) else (value, None)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with FakeAnthropic(turns, faults=faults, port=given.port, log=given.log) as fake:
        for name, setting in fake.environment().items():
            sys.stdout.write(f"export {name}={setting}\n")
        sys.stdout.flush()
        ended.wait()


if __name__ == "__main__":
    main()
