from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.proxy import Proxy
from tests.settings import DATABASE


@pytest.fixture
def proxy() -> Iterator[Proxy | None]:
    """The way from child processes to the database server, where there is one."""
    if DATABASE == "sqlite":
        yield None
        return
    proxy = Proxy(os.environ["AGENTRUNS_TEST_PG_HOST"], os.environ["AGENTRUNS_TEST_PG_PORT"])
    yield proxy
    proxy.flowing.set()
    proxy.close()
