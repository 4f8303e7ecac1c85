"""The wheel: what is in it, what it asks for, and that it works in a project that has nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

from agentruns import __version__
from tests.programs import ROOT, run_program

UV = shutil.which("uv", path=str(Path(sys.executable).parent))
OTHERS = ("DJANGO", "AGENTRUNS", "PYTHON")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
# Modules whose one purpose is an extra, or the tests of a project.
DOORS = {
    "agentruns.tasks": "celery", "agentruns.contrib.opentelemetry": "opentelemetry",
    "agentruns.testing.pytest_plugin": "pytest", "agentruns.tools.mcp.http": "httpx2",
    "agentruns.tools.mcp.tasks": "mcp",
}  # fmt: skip


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    return run_program(*map(str, command), cwd=cwd, env=ENVIRONMENT, **variables).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    if UV:
        run(UV, "build", "--quiet", "--system-certs", "--wheel", "--out-dir", folder, ROOT)
    else:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


def test_it_holds_the_package_and_nothing_else_and_asks_for_little(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = BytesParser().parsebytes(archive.read(held["METADATA"]))
        assert archive.read(held["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        points = archive.read(held["entry_points.txt"]).decode().split()
    assert points == ["[pytest11]", "agentruns", "=", "agentruns.testing.pytest_plugin"]
    package = ROOT / "agentruns"
    ours = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(ROOT)) for path in ours}
    suffixes = {Path(name).suffix for name in names}
    assert {".py", ".html", ".css", ".js"} <= suffixes and "agentruns/py.typed" in names
    assert (metadata["Version"], metadata["Requires-Python"]) == (__version__, ">=3.11")
    assert (metadata["License-Expression"], metadata["License-File"]) == ("MIT", "LICENSE")
    asked: dict[str, set[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        (extra,) = re.findall(r"extra == '(\w+)'", marker) or [""]
        asked.setdefault(extra, set()).add(re.split(r"[<>=~!]", requirement.strip())[0].lower())
    offered = {name: {name} for name in ("anthropic", "celery", "mcp", "openai")}
    offered |= {"otel": {"opentelemetry-api"}, "postgres": {"psycopg[binary]"}}
    offered |= {"files": {"pillow", "pypdf"}, "slack": {"slack-sdk"}, "webhooks": {"standardwebhooks"}}
    needed = {"django", "django-ninja", "markdown-it-py", "nh3", "pydantic"}
    assert asked == {"": needed, **offered, "all": set().union(*offered.values())}
    assert set(metadata.get_all("Provides-Extra", [])) == {*offered, "all"}


def interpreter(version: str) -> str:
    """Find a Python of this version: this one, one on PATH, that of `make test-browser-61`; or skip."""
    told = "import sys; print('%d.%d' % sys.version_info[:2], sys._base_executable)"
    for candidate in (sys.executable, shutil.which(f"python{version}"), str(ROOT / ".venv61/bin/python")):
        if candidate is None or not Path(candidate).exists():
            continue
        asked = subprocess.run([candidate, "-c", told], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.split()[0] == version:
            return asked.stdout.split(maxsplit=1)[1].strip()
    pytest.skip(f"there is no Python {version} here")


def installed(wheel: Path, version: str, folder: Path) -> Path:
    """Install the wheel and what it asks for, and nothing else; return the Python of that environment."""
    python, base = folder / "bin" / "python", interpreter(version)
    constraints = ROOT / "constraints.txt"
    if UV:
        run(UV, "venv", "--quiet", "--python", base, folder)
        run(UV, "pip", "install", "--quiet", "--system-certs", "--python", python, "-c", constraints, wheel)
    else:
        run(base, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    return python


def project(python: Path, folder: Path) -> None:
    """Follow the README: a new project, the app, ten lines; here its refund is one that asks."""
    folder.mkdir()
    run(python.with_name("django-admin"), "startproject", "site_", ".", cwd=folder)
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(# shop/agents\.py\n.*?)```", readme, re.DOTALL)
    assert code.count('"cents": 500}') == 1
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / "agents.py").write_text(code.replace('"cents": 500}', '"cents": 50_000}'))
    settings = folder / "site_" / "settings.py"
    settings.write_text(settings.read_text() + '\nINSTALLED_APPS += ["agentruns", "shop"]\n')


PEOPLE = """
import uuid
from django.contrib.auth.models import AbstractUser
from django.db import models

class Person(AbstractUser):
    id = models.{}
"""
UUID_KEY = "UUIDField(primary_key=True, default=uuid.uuid4)"
BARE = """
SECRET_KEY = "only for tests"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "agentruns", "shop", "people"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "bare.sqlite3"}}}}
AUTH_USER_MODEL = "people.Person"
DEFAULT_AUTO_FIELD = "django.db.models.{}"
USE_TZ = True
"""


def people(folder: Path, key: str, auto_field: str) -> None:
    """Write an app with users of the project's own, and settings with nothing but what it needs."""
    (folder / "people").mkdir(parents=True)
    (folder / "people" / "__init__.py").touch()
    (folder / "people" / "models.py").write_text(PEOPLE.format(key))
    (folder / "bare.py").write_text(BARE.format(auto_field))


ASKED = ["run_started", "user", "assistant", "approval_requested", "approval_decided"]
KINDS = [*ASKED, "tool_started", "tool_result", "assistant", "run_completed"]


@pytest.mark.parametrize(("version", "django"), [("3.11", "5.2"), ("3.13", "6.1")])
def test_a_new_project_has_an_approved_tool(wheel: Path, tmp_path: Path, version: str, django: str) -> None:
    python = installed(wheel, version, tmp_path / "venv")
    folder = tmp_path / "project"
    project(python, folder)
    people(folder, UUID_KEY, "AutoField")

    def lived(story: str, settings: str) -> dict[str, Any]:
        newcomer = ROOT / "tests" / "packaging" / "newcomer.py"
        told = run(python, newcomer, story, cwd=folder, DJANGO_SETTINGS_MODULE=settings)
        facts: dict[str, Any] = json.loads(told.splitlines()[-1])
        assert facts.pop("django").startswith(f"{django}.")
        return facts

    doors = {**DOORS, **({"agentruns.contrib.django_tasks": "django_tasks"} if django == "5.2" else {})}
    same = {"status": "completed", "output": "Refunded.", "by": "maria", "kinds": KINDS}
    assert lived("admin", "site_.settings") == {"pages": [200, 302, 200], "missing": doors, **same}
    assert lived("bare", "bare") == same


def test_no_migration_depends_on_a_project(tmp_path: Path) -> None:
    people(tmp_path, "BigAutoField(primary_key=True)", "AutoField")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    command = (sys.executable, "-m", "django", "makemigrations", "agentruns", "--check", "--dry-run")
    names = {"DJANGO_SETTINGS_MODULE": "bare", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    assert "No changes detected in app 'agentruns'" in run(*command, cwd=tmp_path, **names)


def test_migrations_read_no_settings_but_who_the_users_are() -> None:
    for path in (ROOT / "agentruns" / "migrations").glob("0*.py"):
        read = path.read_text()
        assert set(re.findall(r"settings\.\w+", read)) <= {"settings.AUTH_USER_MODEL"}, path.name
        assert "AGENTRUNS_" not in read and "agentruns.conf" not in read, path.name
