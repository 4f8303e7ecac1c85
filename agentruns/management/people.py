"""Whom a command acts for."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model

from agentruns.management.base import usage
from agentruns.management.terminal import escaped


def user_named(name: str) -> Any:
    """Return the active user of that name; end the command where there is none."""
    users = get_user_model()
    user = users._default_manager.filter(**{users.USERNAME_FIELD: name}).first()
    if user is None:
        usage(f"There is no user {escaped(name)}.")
    if not user.is_active:
        usage(f"User {escaped(name)} is not active, so nothing can be done in their name.")
    return user
