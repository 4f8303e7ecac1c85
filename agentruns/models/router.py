"""A database router for projects that give the journal a database of its own."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.models import Model

from agentruns.conf import settings

LABEL = "agentruns"


class JournalRouter:
    """A router that keeps the tables of agentruns in AGENTRUNS_DATABASE.

    Put it first in DATABASE_ROUTERS: a router before it might send its reads to a replica.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        """Choose the journal's database for our models, because a replica may lag behind."""
        if _is_ours(model):
            return settings.DATABASE
        # The owner of a run is in the users' database; with the hint, Django would look in the run's.
        return router.db_for_read(model) if _is_ours(hints.get("instance")) else None

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        """Choose the journal's database for our models. Users whom our rows refer to stay in their own."""
        if _is_ours(model):
            return settings.DATABASE
        return router.db_for_write(model) if _is_ours(hints.get("instance")) else None

    def allow_relation(self, one: Model, other: Model, **hints: Any) -> bool | None:
        """Allow our rows to refer to users in another database; they have no constraint."""
        return True if _is_ours(one) or _is_ours(other) else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Allow our tables in the journal's database only."""
        return db == settings.DATABASE if app_label == LABEL else None


def _is_ours(model: Any) -> bool:
    return model is not None and model._meta.app_label == LABEL
