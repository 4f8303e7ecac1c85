"""docs/howto/chat.md, followed in a fresh project: its files, its commands, and the page in a browser."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.programs import ROOT, run_program
from tests.waiting import wait_for

PAGE = (ROOT / "docs/howto/chat.md").read_text()


def test_the_page_of_the_chat_works_in_a_fresh_project(browser: Browser, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "AGENTRUNS"))}
    env["PYTHONPATH"] = str(ROOT)
    manage = [sys.executable, "manage.py"]
    run_program(sys.executable, "-m", "django", "startproject", "mysite", ".", cwd=tmp_path, env=env)
    run_program(*manage, "startapp", "shop", cwd=tmp_path, env=env)
    with (tmp_path / "mysite/settings.py").open("a") as settings:
        settings.write('INSTALLED_APPS += ["agentruns", "shop"]\n')
    for name, text in re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    shutil.copytree(ROOT / "docs/chat", tmp_path / "shop/static/chat")
    run_program(*manage, "migrate", cwd=tmp_path, env=env)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    serve = [*manage, "runserver", "--noreload", place]
    with subprocess.Popen(serve, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: is_open(place), "the site")
            page = browser.new_page()
            page.goto(f"http://{place}/static/chat/index.html")
            for number, text in enumerate(["Hi", "Are you there?"], 1):
                page.get_by_label("Message").fill(text)
                page.keyboard.press("Enter")
                expect(page.locator("#log .user")).to_have_count(number)
                run_program(*manage, "resume_runs", cwd=tmp_path, env=env)
                expect(page.locator("#log .assistant")).to_have_text(["Hello."] * number)
            page.close()
        finally:
            server.terminate()


def is_open(place: str) -> bool:
    """Check whether a server listens."""
    host, _, port = place.partition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0
