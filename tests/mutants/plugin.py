"""A pytest plugin that makes the tests of a mutant quick.

Test databases are copies of a migrated one, which the first run keeps as the template.
Hypothesis does not shrink an example that fails: that takes minutes, and the mutant has fallen already.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

VARIABLE = (
    "AGENTRUNS_MUTANT_TEMPLATES"  # the beginning of the templates' names; unset, databases are migrated
)

settings.register_profile(
    "mutants", phases={*Phase} - {Phase.shrink, Phase.explain}, report_multiple_bugs=False
)
settings.load_profile("mutants")  # the profile in conftest.py inherits from it


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Fill the test databases from their templates while Django makes the databases."""
    if fixturedef.argname != "django_db_setup" or VARIABLE not in os.environ:
        return (yield)
    from django.core.management.commands.migrate import Command
    from django.db import connections

    migrate = Command.handle

    def fill(command: Command, *arguments: Any, **options: Any) -> None:
        connection = connections[options["database"]]
        name = connection.settings_dict["NAME"]
        template = Path(f"{os.environ[VARIABLE]}_{connection.alias}")
        if template.exists():
            copy(connection, template, name)
        else:
            migrate(command, *arguments, **options)
            copy(connection, name, template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Command, "handle", fill)
        return (yield)


def copy(connection: Any, source: str | Path, target: str | Path) -> None:
    """Replace a database with a copy of another one, which nobody uses."""
    connection.close()
    if connection.vendor == "sqlite":
        shutil.copy(source, target)
        return
    with connection.creation._nodb_cursor() as cursor:
        cursor.execute(f'DROP DATABASE IF EXISTS "{Path(target).name}"')
        cursor.execute(f'CREATE DATABASE "{Path(target).name}" TEMPLATE "{Path(source).name}"')
    if isinstance(target, Path):
        target.touch()  # there is a template of this name now
