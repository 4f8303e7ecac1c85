"""The preparation of demo and console: tables, the shop's data, and a user to log in with."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db.models import Q

from project.helpdesk import past
from project.helpdesk.models import Ticket

NAME = PASSWORD = "demo"  # noqa: S105 - printed for everybody to use

MAY = (
    *("decide_approval", "resume_run", "cancel_run", "pause_run", "resolve_orphan", "review_run"),
    *("start_run", "act_for", "fork_run", "switch", "raise_budget", "deliver_event"),
    *("write_rule", "activate_rule"),
)


def prepare() -> Any:
    """Migrate, fill an empty database with the shop's data and past, and return the demo user."""
    call_command("migrate", verbosity=0, interactive=False)
    if not Ticket.objects.exists():
        call_command("loaddata", "helpdesk", verbosity=0)
    past.live_through()
    return demo_user()


def demo_user() -> Any:
    """Find or create the staff user who decides, and who may view but not change the shop's data."""
    user, created = get_user_model().objects.get_or_create(username=NAME, defaults={"is_staff": True})
    if created:
        user.set_password(PASSWORD)
        user.save()
    ours = Q(content_type__app_label__in=["agentruns", "helpdesk"])
    granted = Permission.objects.filter(ours, Q(codename__startswith="view_") | Q(codename__in=MAY))
    user.user_permissions.add(*granted)
    return user
