from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.demo_project import Project


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, subprocess.CompletedProcess[str]]:
    """The project after its first demo, and what the demo printed. Not to be changed: take a copy."""
    project = Project(tmp_path_factory.mktemp("demo"))
    return project, project.run("demo")


@pytest.fixture
def project(told: tuple[Project, object], tmp_path: Path) -> Project:
    """A copy of the project after its first demo."""
    shutil.copytree(told[0].folder, tmp_path / "copy")
    return Project(tmp_path / "copy")
