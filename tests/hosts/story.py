"""A whole story, as the people of a host project live it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from agentruns import start_run
from agentruns.conf import settings
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

EVERYTHING = {
    "tools": [
        call("post", text="x"),
        call("annotate", number="A1", note="seen"),
        call("search", query="x"),
        call("search", query="y"),
        call("refund", cents=5000),
    ]
}


def story() -> dict[str, Any]:
    """Start for a user, wait for a person, decide in the admin, finish, and ask the API about it."""
    boss = get_user_model().objects.create_superuser("boss")
    Order.objects.using(settings.DATABASE).create(number="A1", customer="Ada", total_cents=1)
    agent = shop_agent("hosted", EVERYTHING)
    run = start_run(agent, "do it", "s1", actor=boss, idempotency_key="k")
    waiting = sweep().waiting
    card = Approval.objects.using(settings.DATABASE).get()
    client = Client()
    client.force_login(boss)
    pages = {name: client.get(url).status_code for name, url in admin_pages(run, card).items()}
    approve = reverse("admin:agentruns_approval_approve", args=[card.pk])
    clicked = client.post(approve, {"digest": card.digest, "reason": "fine"}).status_code
    completed = sweep().completed
    queued = client.post("/api/runs", {"agent": "hosted", "input": "again"}, content_type="application/json")
    cancelled = client.post(f"/api/runs/{queued.json()['id']}/cancel", content_type="application/json")
    call_command("verify_journal", database=settings.DATABASE)
    ended = Run.objects.using(settings.DATABASE).get(pk=run.pk)
    decided = Approval.objects.using(settings.DATABASE).get(pk=card.pk)
    return {
        "waiting": waiting,
        "completed": completed,
        "pages": pages,
        "clicked": clicked,
        "api": [queued.status_code, cancelled.status_code, cancelled.json()["status"]],
        "runs": [one["id"] for one in client.get("/api/runs", {"status": "completed"}).json()["items"]],
        "run": str(ended.pk),
        "status": ended.status,
        "boss": str(boss.pk),
        "owner": str(ended.owner_id),
        "decided_by": str(decided.decided_by_id),
        "actors": sorted(
            {str(row.payload["actor"]["id"]) for row in ended.messages.filter(kind="run_started")}
        ),
        "note": Order.objects.using(settings.DATABASE).get().note,
        "effects": sorted(line["tool"] for line in Effects.from_environment().lines()),
    }


def admin_pages(run: Run, card: Approval) -> dict[str, str]:
    return {
        "runs": reverse("admin:agentruns_run_changelist"),
        "run": reverse("admin:agentruns_run_change", args=[run.pk]),
        "approvals": reverse("admin:agentruns_approval_changelist"),
        "approval": reverse("admin:agentruns_approval_change", args=[card.pk]),
    }
