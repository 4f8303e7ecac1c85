"""Compare the pinned versions with the published advisories; exits with 1 where one is affected.

Says so where there is nothing to compare with: a check that could not be made has not passed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

URL = "https://api.osv.dev/v1/querybatch"
PINS = Path(__file__).parent.parent / "locked-dev.txt"
SECONDS = 20  # waits: no test; without an answer nothing is compared


def pinned(text: str) -> list[tuple[str, str]]:
    """List names and versions of a locked file."""
    return re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE)


def advisories(url: str, pins: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Find the ids of the advisories for each affected pin."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pins]
    body = json.dumps({"queries": queries}).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=SECONDS) as response:  # waits: the same
        results: list[dict[str, Any]] = json.load(response)["results"]
    if len(results) != len(pins):
        raise ValueError(f"{len(results)} answers to {len(pins)} questions")
    return {
        f"{name} {version}": [each["id"] for each in found["vulns"]]
        for (name, version), found in zip(pins, results, strict=True)
        if found.get("vulns")
    }


def main(url: str) -> int:
    pins = pinned(PINS.read_text())
    try:
        affected = advisories(url, pins)
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        print(f"NOT AUDITED: no advisories to compare {len(pins)} pinned packages with ({url}: {error}).")
        return 0
    for pin, ids in affected.items():
        print(f"{pin}: {', '.join(ids)}")
    print(f"{len(pins)} pinned packages compared with osv.dev, {len(affected)} with advisories.")
    return 1 if affected else 0


if __name__ == "__main__":
    raise SystemExit(main(os.environ.get("AUDIT_URL", URL)))
