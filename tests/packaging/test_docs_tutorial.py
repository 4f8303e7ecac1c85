"""The tutorial, followed to the letter in an empty folder: each file written, each command given."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.programs import run_program
from tests.waiting import LIMIT

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
SAMPLE = "01a203b4-0487-77a1-ab95-a6812d163362"  # the run of the page
HERE_ALREADY = ("python -m venv ", "python -m pip install ")
VISITOR = """
import re
import django
django.setup()
from django.test import Client

ann = Client(SERVER_NAME="127.0.0.1")
assert ann.login(username="ann", password="tutorial")
queue = ann.get("/admin/agentruns/approval/").content.decode()
(card,) = {*re.findall(r"/admin/agentruns/approval/[0-9a-f-]{36}/change/", queue)}
page = ann.get(card).content.decode()
assert "Refund 249.00 EUR for order A1" in page
(digest,) = {*re.findall(r'name="digest" value="(\\w+)"', page)}
assert ann.post(card.replace("change/", "approve/"), {"digest": digest}).status_code == 302
"""


class Reader:
    """Somebody who does what the page says, from its top to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = SAMPLE
        self.names = {
            name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "AGENTRUNS"))
        } | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def write(self, text: str) -> None:
        """Write a file of the page, or what it adds to the end of one that is there."""
        first, rest = text.split("\n", 1)
        with (self.folder / first.removeprefix("# ")).open("a") as file:
            file.write(rest)

    def console(self, text: str) -> None:
        for command, said in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE):
            if command == "python manage.py runserver":
                self.visit()
            elif not command.startswith(HERE_ALREADY):
                self.give(command, said)

    def visit(self) -> None:
        """Press Approve in the admin."""
        assert not (self.folder / "bank.txt").exists()
        names = self.names | {"DJANGO_SETTINGS_MODULE": "mysite.settings"}
        subprocess.run([sys.executable, "-c", VISITOR], cwd=self.folder, env=names, check=True, timeout=LIMIT)

    def give(self, command: str, said: str) -> None:
        command = command.replace(SAMPLE, self.run_id)
        done = run_program("sh", "-c", command, code=None, cwd=self.folder, env=self.names)
        expected = 3 if " run_agent " in command else 0
        if said == "Killed\n":  # how a shell says it, which may run the command in its own place
            assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
            return
        assert done.returncode == expected, f"{command}\n{done.stderr}"
        if found := re.search(r"^Run (\S{36}) ", done.stdout, re.MULTILINE):
            self.run_id = found[1]
        if said:
            assert plain(done.stdout) == plain(said), command


def plain(text: str) -> list[str]:
    """Take out what changes from one reader to the next."""
    for changing in (
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"[\d-]{10} +[\d:]{8}",
        r"\b[0-9a-f]{12}\b",
    ):
        text = re.sub(changing, "…", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_the_tutorial_ends_with_one_refund(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        {"python": reader.write, "console": reader.console}[kind](text)
    assert reader.run_id != SAMPLE
    assert (tmp_path / "bank.txt").read_text().count("cents for A1") == 1
