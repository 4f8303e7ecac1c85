"""Sends the shop to the journal's database and everything else to the other."""

from __future__ import annotations

from typing import Any

ELSEWHERE = {"shop"}


class Router:
    def place(self, label: str) -> str:
        """Name the database an app lives in."""
        return "other" if label in ELSEWHERE else "default"

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Read where the app lives."""
        return self.place(model._meta.app_label)

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        """Make an app's tables where it lives, and nowhere else."""
        return db == self.place(app_label)
