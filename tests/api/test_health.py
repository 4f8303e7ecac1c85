"""Health: a word for everybody, figures for those who may see all runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.models import Control, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user

pytestmark = pytest.mark.django_db(transaction=True)


def bearer(user: Any, *scopes: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {create_token(user, scopes)[1]}"}


def asked(client: Any, **headers: str) -> dict[str, Any]:
    response = client.get("/api/health", headers=headers)
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    return body


def test_who_is_told_what(owner: Any) -> None:
    viewer = make_user("viewer", "view_run")
    everything = {
        "status": "ok",
        "database": connection.vendor,
        "sweeper": "never",
        "sweeper_seen_at": None,
        "oldest_queued_at": None,
    }
    nobody, staff = Api().client, Api(viewer).client
    assert asked(nobody) == asked(Api(owner).client) == {"status": "ok"}
    assert asked(staff) == asked(nobody, **bearer(viewer, "runs:read")) == everything
    for headers in (
        bearer(owner, "runs:read"),
        bearer(viewer, "approvals:decide"),
        {"Authorization": "Bearer nonsense"},
        {"Authorization": "\x7f" * 5000},
    ):
        # With a header that counts for nothing the session does not count either.
        assert asked(nobody, **headers) == asked(staff, **headers) == {"status": "ok"}
    viewer.is_active = False
    viewer.save()
    assert asked(staff) == {"status": "ok"}


def test_the_figures(shop: Agent) -> None:
    staff = Api(make_user("viewer", "view_run"))
    runs = [start_run(shop, "refund", f"s{number}") for number in range(3)]
    Run.objects.filter(pk=runs[0].pk).update(not_before=Now() + timedelta(hours=1))
    status, body = staff.get("/health")
    assert (status, body["sweeper_seen_at"]) == (200, None)
    oldest = Run.objects.get(pk=runs[1].pk).updated_at
    assert body["oldest_queued_at"] == oldest.isoformat(timespec="microseconds")[:-6] + "Z"
    sweep()
    status, body = staff.get("/health")
    seen = Control.objects.sweepers().get().seen_at
    assert body["sweeper"] == "ok"
    assert body["sweeper_seen_at"] == seen.isoformat(timespec="microseconds")[:-6] + "Z"
    assert body["oldest_queued_at"] is None
    Control.objects.update(seen_at=Now() - timedelta(minutes=11))
    assert staff.get("/health")[1]["sweeper"] == "late"
