"""The project of docs/howto/tenants.md with two tenants, each with a run that waits under the same keys."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission

from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.api.http import Api
from tests.shop.agents import call, shop_agent

TENANTS = ("north", "south")
KEY = "order-4711"


def waiting_runs() -> dict[str, Run]:
    """Start a run of each tenant under the same keys, and drive each until it waits for its approval."""
    runs = {}
    for tenant in TENANTS:
        post = call("refund", cents=cents(tenant))
        agent = shop_agent(f"shop-{tenant}", {"text": f"secret-{tenant}", "tools": [post]})
        body = {"agent": agent.name, "input": f"secret-{tenant}", "session": KEY, "idempotency_key": "k"}
        status, run = Api(user(tenant)).post("/runs", body)
        assert status == 201, run
        runs[tenant] = Run.objects.get(pk=run["id"])
        sweep()
    assert {run.status for run in Run.objects.all()} == {"awaiting-approval"}
    return runs


def cents(tenant: str) -> int:
    """Return what the run of a tenant wants to refund."""
    return 5101 if tenant == "north" else 6202


def user(tenant: str, role: str = "plain") -> Any:
    """Return a user of a tenant, made when first asked for; staff has all permissions of agentruns."""
    users = get_user_model().objects
    name = f"{role}@{tenant}"
    if found := users.filter(username=name).first():
        return found
    made = users.create_user(name, is_staff=role == "staff")
    if role == "staff":
        made.user_permissions.set(Permission.objects.filter(content_type__app_label="agentruns"))
    return made
