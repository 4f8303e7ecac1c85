"""Prints the OpenAPI document of the ready-made API: `python -m tests.api.snapshot > docs/openapi.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"


def text() -> str:
    """Return the document as it is kept in the repository; settings have to be there."""
    from agentruns.api import build_api

    return json.dumps(build_api().get_openapi_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    django.setup()
    print(text(), end="")
