from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from tests.api.http import Api


@pytest.fixture
def api(owner: Any) -> Api:
    """The API as the owner of runs uses it."""
    return Api(owner)


@pytest.fixture(params=[False, True], ids=["autocommit", "atomic-requests"])
def atomic_requests(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)
    return bool(request.param)
