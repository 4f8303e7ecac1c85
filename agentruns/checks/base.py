"""The form of checks: functions that yield messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Tags, register
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.conf import settings

Check = Callable[..., list[CheckMessage]]


def check(*, deploy: bool = False) -> Callable[[Callable[[], Iterator[CheckMessage]]], Check]:
    """Register a check of settings and declarations."""

    def decorate(find: Callable[[], Iterator[CheckMessage]]) -> Check:
        def found(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
            return [*find()]

        found.__name__, found.__doc__ = find.__name__, find.__doc__  # Django reads the signature: no `wraps`
        return register("agentruns", deploy=deploy)(found)

    return decorate


def check_of_database(find: Callable[[BaseDatabaseWrapper], Iterator[CheckMessage]]) -> Check:
    """Register a check that queries the journal's database, where Django checks that one."""

    def found(app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
        alias = settings.DATABASE
        return [*find(connections[alias])] if alias in (databases or ()) else []

    found.__name__, found.__doc__ = find.__name__, find.__doc__
    return register(Tags.database)(found)
