"""The browser of these tests: Debian's Chromium where it is installed, else the one Playwright brings.

Its headless shell is preferred: the same engine without the desktop's browser around it takes less time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, BrowserType, Error, sync_playwright

NOT_WANTED = "AGENTRUNS_NO_BROWSER"
HOW_TO_INSTALL = (
    "No Chromium starts here. Install one with `apt-get install chromium-headless-shell` or with "
    f"`python -m playwright install --with-deps chromium`; where that cannot be, {NOT_WANTED}=1 skips "
    "these tests."
)
ARGUMENTS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class NoBrowserError(Exception):
    """No Chromium starts on this machine; the text says what to do."""


@contextmanager
def running() -> Iterator[Browser]:
    """Start Chromium for the block; raises NoBrowserError."""
    # Playwright's loop runs in this thread, and Django would refuse the database to what looks asynchronous.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    try:
        with sync_playwright() as playwright:
            browser = _launch(playwright.chromium)
            yield browser
            browser.close()
    finally:
        os.environ.pop("DJANGO_ALLOW_ASYNC_UNSAFE")
        if before is not None:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


def _launch(chromium: BrowserType) -> Browser:
    arguments = ARGUMENTS + ["--no-sandbox"] * (os.geteuid() == 0)  # as root there is none to be had
    errors = []
    installed = filter(None, map(shutil.which, ["chromium-headless-shell", "chromium"]))
    for executable in [*installed, None]:  # None: Playwright's, which is a headless shell too
        try:
            return chromium.launch(executable_path=executable, args=arguments)
        except Error as error:
            errors.append(f"{executable or 'of Playwright'}: {error.message}")
    raise NoBrowserError("\n".join([HOW_TO_INSTALL, *errors]))
