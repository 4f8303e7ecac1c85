"""One process of a system: `python -m benchmarks.kill_comparison.child MODULE start|recover VARIANT URL`."""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(module: str, action: str, variant: str, url: str) -> None:
    """Start the run, which kills this process, or recover it and say what came of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        system = importlib.import_module(f"benchmarks.kill_comparison.{module}")
    except ImportError as error:
        print(json.dumps({"missing": error.name or str(error)}), file=answers)
        return
    if action == "start":
        system.start(variant, url)
        return
    print(json.dumps(system.recover(variant, url)._asdict()), file=answers, flush=True)
    os._exit(0)  # no system's threads are waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
