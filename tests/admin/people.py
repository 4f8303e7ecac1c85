"""The people of the console's tests, by what they may do."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

PERMISSIONS: dict[str, list[str]] = {
    "staff": [],
    "viewer": ["view_run", "view_approval"],
    "decider": ["decide_approval"],
    "operator": ["view_run", "resume_run", "cancel_run"],
    "resumer": ["resume_run", "cancel_run"],
    "resolver": ["view_run", "resolve_orphan"],
}
ROLES = ["anonymous", "outsider", *PERMISSIONS, "superuser"]
PERMISSIONS["revealer"] = ["decide_approval", "reveal_arguments"]
OTHERS = {
    "reader": ["view_run"],
    "pauser": ["view_run", "pause_run"],
    "adopter": ["view_run", "adopt_definition"],
    "blind": ["pause_run", "adopt_definition"],
    "customer": ["view_run", "pause_run", "adopt_definition", "resume_run", "cancel_run"],  # not staff
}


def user(role: str) -> Any:
    """Return the user of a role, made when first asked for; an outsider may all but is not staff."""
    users = get_user_model().objects
    found = users.filter(username=role).first()
    if found is not None:
        return found
    if role == "superuser":
        return users.create_superuser(role)
    made = users.create_user(role, is_staff=role not in ("outsider", "customer"))
    every = [name for names in PERMISSIONS.values() for name in names]
    names = every if role == "outsider" else {**PERMISSIONS, **OTHERS}[role]
    made.user_permissions.set(
        Permission.objects.filter(content_type__app_label="agentruns", codename__in=names)
    )
    return made


def browser(role: str, **options: Any) -> Client:
    """Return a client that is logged in as a role."""
    client = Client(**options)
    if role != "anonymous":
        client.force_login(user(role))
    return client
