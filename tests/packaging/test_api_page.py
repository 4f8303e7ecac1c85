"""The page about the API: every request it shows is sent with curl, and answered as it says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django.live_server_helper import LiveServer

from agentruns import Agent, tool
from agentruns.api.errors import PROBLEMS, URN
from agentruns.models import Approval, Run
from agentruns.services.api_tokens import create_token
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.api.snapshot import FILE
from tests.commands.running import run as manage
from tests.programs import run_program
from tests.shop.agents import call

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
# What is another one each time, and what the page leaves out.
CHANGING = {
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "ID",
    r"\d{4}-\d\d-\d\dT[\d:.]+Z": "TIME",
    r'W/"[0-9a-f]{32}"': "ETAG",
    r'"0\w{3}…"': '"ID"',
    r": ping\n": "…\n",  # for as long as nothing happens
}


@tool(
    requires_approval=True,
    risk="high",
    rules=True,
    describe=lambda args: f"Refund {args['cents'] / 100:.2f} EUR for order {args['order']}",
)
def refund(order: str, cents: int) -> str:
    """Refund an order."""
    return "refunded"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Find the commands of a text, each with what it prints."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            command = ""
            while lines and (not command or _goes_on(command)):
                command += lines.pop(0)
            yield command.strip(), "".join(lines)


def _goes_on(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\\n")


def pattern(said: str) -> str:
    """Build what an answer has to match: … is anything, and members of objects may be left out beside it."""
    said = re.escape(" ".join(plain(said).split())).replace(r"\ ", " ")
    return said.replace(", …", ".*?").replace("…, ", ".*?").replace("…", ".*?").replace(", ", ", (?:.*?, )?")


def plain(text: str) -> str:
    for changing, name in CHANGING.items():
        text = re.sub(changing, name, text)
    return text


@pytest.fixture(scope="session")
def server(django_db_setup: None, live_server: LiveServer) -> str:
    """The address of a server that was started after the tests' database: it looks which one that is."""
    return str(live_server.url)


@pytest.mark.django_db(transaction=True)
def test_every_request_of_the_page_is_answered_as_it_says(server: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("There is no curl here, with which the requests of docs/api.md are sent.")
    turns = [{"tools": [call("refund", order="1004", cents=34900)]}, {"text": "Refunded."}]
    Agent("support", instructions="Help.", tools=[refund], model=ScriptedModel(turns))
    ann = user("superuser")
    ann.username = "ann"
    ann.save()
    scopes = ["runs:read", "runs:write", "approvals:decide", "events:write", "rules:write"]
    _token, text = create_token(ann, scopes)
    names = {**os.environ, "TOKEN": text}
    sent = 0
    for command, said in commands(PAGE):
        if command.startswith("curl "):
            names |= here()
            answered = curl(command if said else f"{command} --fail", names, server)
            fits = re.fullmatch(pattern(said) or ".*", " ".join(plain(answered).split()))
            assert fits, f"{command}\n{answered}"
            if tag := re.search(r'^ETag: (W/"\w+")', answered, re.MULTILINE):
                names["ETAG"] = tag[1]
            sent += 1
        elif command == "python manage.py resume_runs":
            assert manage("resume_runs").code == 0
    assert sent == PAGE.count("\n$ curl ") > 10


def here() -> dict[str, str]:
    """Set the variables of the page."""
    run, approval = Run.objects.first(), Approval.objects.first()
    names = {"RUN": str(run.pk)} if run else {}
    return names | ({"APPROVAL": str(approval.pk), "DIGEST": approval.digest} if approval else {})


def curl(command: str, names: dict[str, str], server: str) -> str:
    """Send a request of the page."""
    words = command.replace("curl ", "curl -sS --noproxy '*' --max-time 30 ", 1)
    return run_program("sh", "-c", words.replace("https://example.org", server), env=names).stdout


def test_the_table_of_errors_has_every_type() -> None:
    (table,) = re.findall(r"^\| status \| `type`.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    rows = {
        (int(status), name)
        for status, cell in re.findall(r"^\| (\d+) \| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", cell)
    }
    known = {(status, name) for status, name, _title in PROBLEMS.values()}
    documented = re.findall(
        rf'"type": "{URN}([\w-]+)",\s+"title": "[^"]*",\s+"status": (\d+)', FILE.read_text()
    )
    assert rows == known | {(int(status), name) for name, status in documented}
