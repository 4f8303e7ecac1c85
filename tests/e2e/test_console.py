"""`make console`: a web server and a worker that start and stop together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar

import pytest

from tests.e2e.demo_project import ROOT, Project, answers
from tests.waiting import LIMIT, wait_for

PACE = "HELPDESK_PACE"


class Browser:
    """As much of one as logging in takes."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.cookies = CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def get(self, path: str) -> str:
        """Return a page."""
        with self.opener.open(self.base + path, timeout=LIMIT) as answer:
            return str(answer.read().decode())

    def log_in(self) -> str:
        """Log in as demo and return the page that follows."""
        self.get("/admin/login/")
        token = next(cookie.value for cookie in self.cookies if cookie.name == "csrftoken")
        form = {"username": "demo", "password": "demo", "csrfmiddlewaretoken": token, "next": "/admin/"}
        data = urllib.parse.urlencode(form).encode()
        with self.opener.open(f"{self.base}/admin/login/", data, timeout=LIMIT) as answer:
            return str(answer.read().decode())


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def console(project: Project, port: int) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        project.command("console", f"--port={port}"),
        cwd=ROOT,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: answers(port), "the web server")
    yield child
    child.terminate()
    child.communicate(timeout=LIMIT)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_log_in_decide_and_stop(project: Project, console: subprocess.Popen[str], port: int) -> None:
    browser = Browser(port)
    assert "Helpdesk agents" in browser.get("/admin/login/")
    assert "Log out" in browser.log_in()
    assert "David Lindqvist" in browser.get("/admin/helpdesk/ticket/")
    assert "openapi" in browser.get("/api/openapi.json")

    project.decide(
        "card = run('ticket-4').approvals.get()\n"
        "agentruns.deny(card.pk, user, 'repair it', digest=card.digest)"
    )
    wait_for(lambda: project.runs()["ticket-4"]["status"] == "completed", "the worker beside the server")

    console.send_signal(signal.SIGTERM)
    out, _ = console.communicate(timeout=LIMIT)
    assert console.returncode == 0, out
    assert f"http://127.0.0.1:{port}/admin/   user demo, password demo" in out
    worker = re.search(r"Process (\d+) watches", out)
    assert worker is not None, out
    assert not is_there(int(worker[1]))
    assert not answers(port)


# What the console's worker is started with, and a worker of the demo is not.
WRITES = """
from agentruns import ModelRequest
from project.helpdesk.model import TranscriptModel
told = []
task = {"role": "user", "content": [{"type": "text", "text": "ticket 1"}]}
said = [task, *[{"role": "assistant", "content": []}] * 2]
request = ModelRequest(model="", system="", messages=said, tools=[], step=2, on_text=told.append)
reply = TranscriptModel().propose(request)
assert "".join(told) in ("", reply.content[0]["text"])
print("words", len(told))
"""


def test_an_answer_can_be_watched_as_it_is_written(project: Project) -> None:
    paced = {PACE: "0.001"}
    assert "words 16" in project.run("shell", "-c", WRITES, **paced).stdout
    assert "words 0" in project.run("shell", "-c", WRITES).stdout


# Somebody wrote while the run worked: the model is asked once more than the transcript has turns.
LONGER = """
from agentruns import ModelRequest
from project.helpdesk.model import UNFORESEEN, TranscriptModel
task = {"role": "user", "content": [{"type": "text", "text": "ticket 1"}]}
said = [task, *[{"role": "assistant", "content": []}] * 3, task]
request = ModelRequest(model="", system="", messages=said, tools=[], step=3)
assert TranscriptModel().propose(request).content[0]["text"] == UNFORESEEN
print("went on")
"""


def test_a_message_while_a_run_works_does_not_fail_it(project: Project) -> None:
    assert "went on" in project.run("shell", "-c", LONGER).stdout


def test_the_demo_user_switches_tools_off_and_goes_on_with_conversations_of_others(project: Project) -> None:
    granted = (
        "from project.helpdesk.preparation import demo_user\n"
        "may = demo_user().has_perm\n"
        "print([may(f'agentruns.{name}') for name in ('switch', 'start_run', 'act_for', 'fork_run')])"
    )
    assert "[True, True, True, True]" in project.run("shell", "-c", granted).stdout


def test_a_port_that_is_taken(project: Project) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        refused = project.run("console", f"--port={taken}")
    assert refused.returncode == 1
    assert f"Port {taken} cannot be used" in refused.stderr
    assert "manage.py console --port" in refused.stderr
