from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.demo_project import Project


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, subprocess.CompletedProcess[str]]:
    """The project after its first demo, and the demo's process. Take a copy to change it.

    The demo takes a dozen processes: one of pytest's runs it, and the others wait for it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    project, told = Project(shared / "demo"), shared / "demo.json"
    with (shared / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            project.folder.mkdir()
            demo = project.run("demo")
            told.write_text(json.dumps([demo.args, demo.returncode, demo.stdout, demo.stderr]))
    return project, subprocess.CompletedProcess(*json.loads(told.read_text()))


@pytest.fixture
def project(ended: tuple[Project, object], tmp_path: Path) -> Project:
    """A copy of the project after its first demo."""
    shutil.copytree(ended[0].folder, tmp_path / "copy")
    return Project(tmp_path / "copy")
