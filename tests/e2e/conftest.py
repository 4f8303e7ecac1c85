from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.demo_project import Project


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, subprocess.CompletedProcess[str]]:
    """The project after its first demo, and the demo's process. Take a copy to change it."""
    project = Project(tmp_path_factory.mktemp("demo"))
    return project, project.run("demo")


@pytest.fixture
def project(ended: tuple[Project, object], tmp_path: Path) -> Project:
    """A copy of the project after its first demo."""
    shutil.copytree(ended[0].folder, tmp_path / "copy")
    return Project(tmp_path / "copy")
