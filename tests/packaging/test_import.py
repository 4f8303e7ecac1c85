"""`import agentruns` is safe anywhere: before Django is set up, without the extras, at no cost."""

import os
import subprocess
import sys

HEAVY = ("django.db.models", "anthropic", "celery", "ninja")


def python(code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_without_django_settings_loads_nothing_heavy():
    code = f"import agentruns, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code) == "[]"


def test_public_names_are_listed_before_they_are_loaded():
    assert python("import agentruns; print(set(agentruns.__all__) <= set(dir(agentruns)))") == "True"


def test_unknown_name_is_an_attribute_error():
    assert python("import agentruns; print(hasattr(agentruns, 'no_such_name'))") == "False"
