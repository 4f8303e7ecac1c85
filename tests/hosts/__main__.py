"""Lives the story in the project that DJANGO_SETTINGS_MODULE names; prints what became of it as JSON."""

from __future__ import annotations

import json

import django
from django.test.utils import setup_databases, setup_test_environment, teardown_databases


def main() -> None:
    """Make the project's databases, live the story, remove them."""
    django.setup()
    from tests.hosts.story import story

    setup_test_environment()
    made = setup_databases(verbosity=0, interactive=False)
    try:
        print(json.dumps(story()))
    finally:
        teardown_databases(made, verbosity=0)


if __name__ == "__main__":
    main()
