"""The decorator that registers a function as a check; the function yields the check's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Tags, register
from django.db import connections

Find = Callable[..., Iterator[CheckMessage]]
Check = Callable[..., list[CheckMessage]]


def check(*, deploy: bool = False, of: Callable[[], str] | None = None) -> Callable[[Find], Check]:
    """Build a decorator that registers a check. With `deploy`, only `check --deploy` runs the check.

    With `of`, which finds the alias of a database, the check gets the connection to that database, and runs
    only if Django checks the database.
    """

    def decorate(find: Find) -> Check:
        def run_check(
            app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
        ) -> list[CheckMessage]:
            if of is None:
                return [*find()]
            return [*find(connections[alias])] if (alias := of()) in (databases or ()) else []

        # Not `wraps`, because Django reads the signature.
        run_check.__name__, run_check.__doc__ = find.__name__, find.__doc__
        return register(Tags.database if of else "agentruns", deploy=deploy)(run_check)

    return decorate
