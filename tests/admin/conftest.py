from __future__ import annotations

import pytest
from django.db import connections


@pytest.fixture(params=["autocommit", "ATOMIC_REQUESTS"])
def requests_commit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs twice: each request in a transaction of its own, or none."""
    monkeypatch.setitem(
        connections.settings["default"], "ATOMIC_REQUESTS", request.param == "ATOMIC_REQUESTS"
    )
    return str(request.param)
