"""A process that dies between a large result's file and its row: `python -m tests.crash.fetching FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def fetcher() -> Any:
    """Return the agent, which both processes know."""
    from tests.files import MEGABYTE, fetch
    from tests.shop.agents import call, shop_agent

    return shop_agent("fetches-a-lot", {"tools": [call("fetch", size=MEGABYTE)]}, tools=[fetch])


def main(folder: str) -> None:
    """Run it, on a storage that kills."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from django.test import override_settings

    from agentruns import run_agent
    from tests.files import alias

    with override_settings(STORAGES=alias(Path(folder), "tests.files.DeadlyStorage")):
        run_agent(fetcher(), "do it", "s1", idempotency_key="k")


if __name__ == "__main__":
    main(sys.argv[1])
