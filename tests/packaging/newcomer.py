"""Run by the Python of a project that has only just installed agentruns: nothing else of tests/ is there.

`python newcomer.py STORY` in the project's folder prints what became of it as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from typing import Any

import django
from django.core.management import call_command


def started() -> Any:
    """Migrate, and run the README's agent until it waits; return the approval it waits for."""
    call_command("migrate", run_syncdb=True, verbosity=0)  # users without migrations, too
    call_command("makemigrations", "agentruns", check=True, dry_run=True, verbosity=0)
    from agentruns import run_agent
    from agentruns.models import Approval

    result = run_agent("support", "Please refund order A1", session="ticket-1", idempotency_key="ticket-1")
    assert result.status == "awaiting-approval", result
    return Approval.objects.get()


def ended(approval: Any) -> dict[str, Any]:
    """Drive what can go on, and return what was lived."""
    call_command("resume_runs", verbosity=0)
    call_command("verify_journal", verbosity=0)
    from agentruns.models import Run

    run = Run.objects.get(pk=approval.run_id)
    approval.refresh_from_db()
    kinds = list(run.messages.order_by("seq").values_list("kind", flat=True))
    return {"status": run.status, "output": run.output, "by": approval.decided_by_name, "kinds": kinds}


def with_admin() -> dict[str, Any]:
    """A person approves in the admin."""
    from django.contrib.auth import get_user_model
    from django.test import Client
    from django.urls import reverse

    approval = started()
    client = Client(headers={"host": "localhost"})
    client.force_login(get_user_model().objects.create_superuser("maria"))
    card = client.get(reverse("admin:agentruns_approval_change", args=[approval.pk]))
    approve = reverse("admin:agentruns_approval_approve", args=[approval.pk])
    clicked = client.post(approve, {"digest": approval.digest, "reason": "in time"})
    pages = [card.status_code, clicked.status_code, client.get(reverse("admin:index")).status_code]
    return {"pages": pages, "missing": missing(), **ended(approval)}


def without_admin() -> dict[str, Any]:
    """No admin, no sessions, no messages, no extras, and users of the project's own."""
    from django.contrib.auth import get_user_model

    from agentruns import approve

    approval = started()
    approve(approval.pk, get_user_model().objects.create_superuser("maria"))
    return ended(approval)


def missing() -> dict[str, str]:
    """Import every module; return those that need what is not installed, and what that is."""
    import agentruns

    found = {}
    for module in pkgutil.walk_packages(agentruns.__path__, "agentruns."):
        if ".migrations." in module.name or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            found[module.name] = str(error.name).partition(".")[0]
    return found


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    django.setup()
    lived = {"admin": with_admin, "bare": without_admin}[sys.argv[1]]()
    print(json.dumps(lived | {"django": django.__version__}))
