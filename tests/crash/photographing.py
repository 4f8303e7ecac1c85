"""A process whose task and tool are pictures, and that dies: `python -m tests.crash.photographing FOLDER`.

AGENTRUNS_CRASH_AT says where, else its storage kills it when it has taken the first file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

BLOCKS = "look at this"


def photographer() -> Any:
    """Return the agent, which both processes know."""
    from agentruns import Image, ToolContext, tool
    from tests.pictures import png
    from tests.shop.agents import act, call, shop_agent

    @tool
    def shoot(ctx: ToolContext) -> Image:
        """Take a large picture."""
        act("shoot", ctx)
        return Image(data=png(1, note=b"y" * 100_000), name="shot.png")

    return shop_agent("shoots-in-a-crash", {"tools": [call("shoot")]}, tools=[shoot])


def task() -> list[Any]:
    from agentruns import Image, Text
    from tests.pictures import BIG

    return [Text(BLOCKS), Image(data=BIG, name="big.png")]


def main(folder: str) -> None:
    """Run it, with a message in between if the point is a message's."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from django.test import override_settings

    from agentruns import run_agent
    from tests.files import alias

    at_point = bool(os.environ.get("AGENTRUNS_CRASH_AT"))
    backend = "django.core.files.storage.FileSystemStorage" if at_point else "tests.files.DeadlyStorage"
    with override_settings(STORAGES=alias(Path(folder), backend)):
        run_agent(photographer(), task(), "s1", idempotency_key="k")


if __name__ == "__main__":
    main(sys.argv[1])
