"""`import agentruns` is safe anywhere: before Django is set up, without the extras, at no cost."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from agentruns import services
from agentruns.utils.late import modules_of
from tests.programs import ROOT, run_program

SDK = ("anthropic", "httpx2", "httpx")
# Folders of which no check imports more than it asks.
LATE = tuple(f"agentruns.{at}." for at in ("admin.approvals", "admin.runs", "engine", "journal", "services"))
HEAVY = ("django.db.models", "anthropic", "celery", "ninja")


def python(code: str, **variables: str) -> str:
    given = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    return run_program(sys.executable, "-c", code, env=given, **variables).stdout.strip()


def test_importing_it_without_settings_loads_nothing_heavy_and_lists_its_names() -> None:
    code = (
        f"import agentruns, sys; print([name for name in {HEAVY} if name in sys.modules]);"
        "print(set(agentruns.__all__) <= set(dir(agentruns)), hasattr(agentruns, 'no_such_name'));"
        "import agentruns.agents.agent, agentruns.providers.anthropic, agentruns.testing;"
        f"print([name for name in (*{SDK}, 'agentruns.models') if name in sys.modules])"
    )
    assert python(code) == "[]\nTrue False\n[]"


# In a project of its own: an agent on Claude in an app, admin and API mounted.
PROJECT = {
    "settings.py": """
        from tests.settings import MIDDLEWARE, SECRET_KEY, STATIC_URL, TEMPLATES, USE_TZ
        INSTALLED_APPS = [
            "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
            "django.contrib.messages", "django.contrib.sessions", "agentruns", "shop",
        ]
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        ROOT_URLCONF = "urls"
        AGENTRUNS_PAYLOAD_STORAGE = ""
    """,
    "urls.py": """
        from django.contrib import admin
        from django.urls import include, path

        urlpatterns = [path("admin/", admin.site.urls), path("api/", include("agentruns.urls"))]
    """,
    "shop/__init__.py": "",
    "shop/agents.py": """
        from agentruns import Agent, tool
        from agentruns.providers.anthropic import AnthropicModel
        from agentruns.providers.window import drop_oldest
        from agentruns.signals import text_streamed


        @tool
        def find(n: int) -> str:
            "Find an order."
            return "found"


        Agent("by-name", instructions="Help.", tools=[find], model="claude-sonnet-5-5")
        compacted = AnthropicModel("claude-sonnet-5-5", compact=drop_oldest)
        Agent("by-object", instructions="Help.", tools=[find], model=compacted)
        text_streamed.connect(print)
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [line.removeprefix("        ") for line in text.strip("\n").splitlines()]
        path.write_text("\n".join(lines).rstrip() + "\n")
    return tmp_path


def of_project(project: Path, code: str) -> str:
    """Run code in the project; return the last line that it prints."""
    code = f"import sys, django; from django.core.management import call_command; {code}"
    told = python(code, DJANGO_SETTINGS_MODULE="settings", PYTHONPATH=f"{project}{os.pathsep}{ROOT}")
    return told.splitlines()[-1]


def test_a_project_with_agents_on_claude_does_not_load_the_sdk_and_does_not_need_it(project: Path) -> None:
    code = (
        f"sys.modules |= dict.fromkeys({SDK});"
        "django.setup(); call_command('check');"
        "call_command('makemigrations', 'agentruns', check=True, dry_run=True);"
        "call_command('migrate', verbosity=0); call_command('list_runs');"
        "from agentruns.agents.agent import get_agent; "
        "print(get_agent('by-object').model.name)"
    )
    assert of_project(project, code) == "claude-sonnet-5-5"


def test_the_checks_of_a_project_without_the_api_import_no_page_no_service_and_no_journal(
    project: Path,
) -> None:
    urls = (project / "urls.py").read_text()
    (project / "urls.py").write_text(urls.replace(', path("api/", include("agentruns.urls"))', ""))
    names = f"sorted(name for name in sys.modules if name.startswith({LATE}))"
    found = of_project(project, f"django.setup(); call_command('check'); print({names})")
    assert ast.literal_eval(found) == [
        "agentruns.admin.approvals.admin", "agentruns.admin.runs.admin",
        "agentruns.engine.wakeup", "agentruns.journal.connection",
    ]  # fmt: skip


def test_a_sweep_loads_no_urls_of_the_project(project: Path) -> None:
    code = (
        "django.setup(); call_command('migrate', verbosity=0, skip_checks=True);"
        "call_command('resume_runs', skip_checks=False); print({'urls', 'ninja'} & {*sys.modules})"
    )
    assert of_project(project, code) == "set()"


def test_a_late_package_has_its_modules_and_says_what_one_of_them_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert services.permissions is sys.modules["agentruns.services.permissions"]
    with pytest.raises(AttributeError, match=r"'agentruns\.services' has no attribute 'nothing'"):
        services.nothing  # noqa: B018 - raises
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").touch()
    (tmp_path / "early" / "late.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        modules_of("early")("late")
