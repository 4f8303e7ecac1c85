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

from tests.e2e.demo_project import Project, answers, console
from tests.waiting import LIMIT, wait_for

PACE = "HELPDESK_PACE"


class Browser:
    """As much of one as logging in takes."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.cookies = CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def get(self, path: str, data: bytes | None = None) -> str:
        with self.opener.open(self.base + path, data, timeout=LIMIT) as answer:
            return str(answer.read().decode())

    def log_in(self) -> str:
        """Log in as demo and return the page that follows."""
        self.get("/admin/login/")
        token = next(cookie.value for cookie in self.cookies if cookie.name == "csrftoken")
        form = {"username": "demo", "password": "demo", "csrfmiddlewaretoken": token, "next": "/admin/"}
        return self.get("/admin/login/", urllib.parse.urlencode(form).encode())


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def served(project: Project) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with console(project) as served:
        yield served


def test_log_in_decide_and_stop(project: Project, served: tuple[subprocess.Popen[str], int]) -> None:
    child, port = served
    browser = Browser(port)
    assert "Helpdesk agents" in browser.get("/admin/login/")
    assert "Log out" in browser.log_in()
    assert "David Lindqvist" in browser.get("/admin/helpdesk/ticket/")
    assert "openapi" in browser.get("/api/openapi.json")

    project.python(
        "card = run('ticket-4').approvals.get()\n"
        "agentruns.deny(card.pk, user, 'repair it', digest=card.digest)"
    )
    completed = "/api/runs?status=completed&agent=helpdesk"
    wait_for(lambda: '"ticket-4"' in browser.get(completed), "the worker beside the server")

    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0, out
    assert f"http://127.0.0.1:{port}/admin/   user demo, password demo" in out
    worker = re.search(r"Process (\d+) watches", out)
    assert worker is not None, out
    assert not is_there(int(worker[1]))
    assert not answers(port)


# What the console's worker is started with, and a worker of the demo is not: a pace at which it writes. And a
# model that is asked once more than the transcript has turns, because somebody wrote while the run worked.
ANSWERS = """
from agentruns import ModelRequest
from project.helpdesk.model import UNFORESEEN, TranscriptModel

def answered(replies, *more):
    told = []
    task = {"role": "user", "content": [{"type": "text", "text": "ticket 1"}]}
    said = [task, *[{"role": "assistant", "content": []}] * replies, *[task] * len(more)]
    request = ModelRequest(model="", system="", messages=said, tools=[], step=replies, on_text=told.append)
    return TranscriptModel().propose(request).content[0]["text"], told

text, told = answered(2)
assert "".join(told) in ("", text)
print("words", len(told), answered(3, "and more")[0] == UNFORESEEN)
from project.helpdesk.preparation import demo_user
names = ("switch", "start_run", "act_for", "fork_run", "raise_budget", "deliver_event")
print({demo_user().has_perm(f"agentruns.{name}") for name in names})
"""


def test_an_answer_can_be_watched_a_message_fails_no_run_and_the_demo_user_may_all(project: Project) -> None:
    may = "{True}"
    assert project.python(ANSWERS, **{PACE: "0.001"}) == f"words 16 True\n{may}\n"
    assert project.python(ANSWERS) == f"words 0 True\n{may}\n"


def test_a_port_that_is_taken(project: Project) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        refused = project.run("console", f"--port={taken}")
    assert refused.returncode == 1
    assert f"Port {taken} cannot be used" in refused.stderr
    assert "manage.py console --port" in refused.stderr
