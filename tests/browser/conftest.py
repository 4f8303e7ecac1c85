from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from django.conf import settings
from django.test import override_settings
from playwright.sync_api import Browser, expect
from pytest_django.live_server_helper import LiveServer

from tests.browser import chromium
from tests.browser.desk import Desk
from tests.browser.visitor import PATIENCE, Visitor, Visitors
from tests.waiting import LIMIT


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium; where none starts the tests fail and say how to install it."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(chromium.running())
        except chromium.NoBrowserError as error:
            started, why = None, str(error)
        if started is None and os.environ.get(chromium.NOT_WANTED) == "1":
            pytest.skip(f"{chromium.NOT_WANTED}=1: {why}")
        if started is None:
            pytest.fail(why, pytrace=False)
        yield started


@pytest.fixture(scope="session", autouse=True)
def _strict_policy(django_db_setup: None) -> Iterator[None]:
    """Before the server starts: it reads the middleware once, and which database is the tests'."""
    middleware = ["tests.browser.policy.strict_policy", *settings.MIDDLEWARE]
    with override_settings(MIDDLEWARE=middleware, ROOT_URLCONF="tests.browser.urls"):
        yield


@pytest.fixture(scope="session")
def _visitors(browser: Browser, live_server: LiveServer) -> Iterator[Visitors]:
    expect.set_options(timeout=PATIENCE)
    visitors = Visitors(browser, live_server.url)
    yield visitors
    for visitor in visitors.gone:
        visitor.context.close()
    for thread in threading.enumerate():  # each still has a connection that the server takes from it
        if "process_request_thread" in thread.name:
            thread.join(LIMIT)


@pytest.fixture
def visit(_visitors: Visitors, live_server: LiveServer) -> Iterator[Visitors]:
    """`visit("decider")`: somebody at a browser; anything it complains about fails the test."""
    yield _visitors
    assert _visitors.leave() == []


@pytest.fixture
def visitor(visit: Visitors) -> Visitor:
    """Somebody who may do everything."""
    return visit()


@pytest.fixture(params=[False, True], ids=["letters", "wide letters"])
def _letters(visit: Visitors, request: pytest.FixtureRequest) -> None:
    """Run the test with the fonts of this machine, and with letters a fifth wider."""
    visit.has_wide_letters = request.param


@pytest.fixture
def desk(live_server: LiveServer) -> Desk:
    """What the desk's agent asks for; its effects are in `effects`."""
    return Desk()
