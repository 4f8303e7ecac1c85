"""The decorator that registers a function as a check; the function yields the check's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Tags, register
from django.db import connections

from agentruns.conf import settings

Find = Callable[..., Iterator[CheckMessage]]
Check = Callable[..., list[CheckMessage]]


def check(*, deploy: bool = False, of_database: bool = False) -> Callable[[Find], Check]:
    """Build a decorator that registers a check. With `deploy`, only `check --deploy` runs the check.

    With `of_database`, the check gets the connection to the journal's database, and runs only if Django
    checks that database.
    """

    def decorate(find: Find) -> Check:
        def run_check(
            app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
        ) -> list[CheckMessage]:
            alias = settings.DATABASE
            if not of_database:
                return [*find()]
            return [*find(connections[alias])] if alias in (databases or ()) else []

        # Not `wraps`, because Django reads the signature.
        run_check.__name__, run_check.__doc__ = find.__name__, find.__doc__
        return register(Tags.database if of_database else "agentruns", deploy=deploy)(run_check)

    return decorate
