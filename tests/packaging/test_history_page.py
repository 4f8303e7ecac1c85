"""The page about looking back: its code is run, its commands are given, and all of them say what it says."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from agentruns.journal.verify import problems
from agentruns.models import Run, Session
from tests.api.http import Api, make_user
from tests.commands.running import run as manage

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "history.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
SAMPLE = "01a20189-67e9-70a1-9b0c-1b07670a3b0b"


class Reader:
    """Somebody who does everything that the page shows, from its top to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {}

    def mine(self, text: str) -> str:
        """Put the names of the things here into a text of the page."""
        first = Run.objects.order_by("created_at").first()
        for theirs, here in {SAMPLE: str(first.pk) if first else SAMPLE, "archive": "other"}.items():
            text = text.replace(theirs, here)
        return text

    def python(self, text: str) -> None:
        exec(text, self.names)

    def pycon(self, text: str) -> None:
        test = doctest.DocTestParser().get_doctest(self.mine(text), self.names, "page", None, None)
        report: list[str] = []
        failed = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False).failed
        assert not failed, "".join(report)
        self.names = test.globs

    def console(self, text: str) -> None:
        for line, said in re.findall(r"^\$ python manage\.py (.*)\n((?:[^$].*\n)*)", text, re.MULTILINE):
            command, _, file = self.mine(line).partition(" > ")
            words = shlex.split(command)
            words = [str(self.folder / word) if word.endswith(".jsonl") else word for word in words]
            outcome = manage(*words)
            assert outcome.code == 0, outcome.err
            if file:
                (self.folder / file).write_text(outcome.out)
            elif said:
                assert ID.sub("ID", outcome.out) == ID.sub("ID", said)

    def http(self, text: str) -> None:
        line, body = self.mine(text).split("\n", 1)
        api = Api(make_user("staff", "view_run", "fork_run", "start_run"))
        path = line.removeprefix("POST /api")
        status, run = api.post(path, body)
        assert (status, run["origin"]) == (201, path.split("/")[2])
        assert api.post(path, body) == (200, run)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_every_example_of_the_page_is_true(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for kind, text in BLOCKS:
        getattr(reader, kind)(text)
    run = reader.names["run"]
    rows = [(str(row.seq), row.kind) for row in run.messages.order_by("seq")]
    assert re.findall(r"^\| (\d+) \| `(\w+)`", PAGE, re.MULTILINE) == rows
    assert Run.objects.filter(origin=run).count() == 5, "four forks, and one that ran again"
    for session in Session.objects.all():
        assert problems(session.pk) == []
