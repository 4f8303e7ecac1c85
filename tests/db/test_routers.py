"""Several databases: the journal in one of its own, and a replica that is asked nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import get_commands, load_command_class
from django.db import connections, router
from django.test import Client
from django.urls import reverse

from agentruns import start_run
from agentruns.management.base import AgentRunsCommand
from agentruns.models import Approval, Message, Run, Session
from agentruns.models.router import JournalRouter
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.helpers import user
from tests.effects import Effects
from tests.hosts.story import EVERYTHING, admin_pages
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

SCOPES = ["runs:read", "runs:write", "approvals:decide"]


def test_every_command_takes_a_database_and_speaks_json() -> None:
    for name in (name for name, app in get_commands().items() if app == "agentruns"):
        found = load_command_class("agentruns", name)
        assert isinstance(found, AgentRunsCommand)
        assert {"--database", "--json"} <= {*found.create_parser("manage.py", name)._option_string_actions}


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_users_are_found_where_they_are(settings: Any) -> None:
    """The journal has a database of its own, in which its tables are made."""
    settings.AGENTRUNS_DATABASE = "other"
    settings.DATABASE_ROUTERS = ["agentruns.models.router.JournalRouter"]
    places = ("default", "other")
    assert [router.allow_migrate(place, "agentruns") for place in places] == [False, True]
    assert [router.allow_migrate(place, "auth") for place in places] == [True, True]
    assert (router.db_for_read(Run), router.db_for_write(Message)) == ("other", "other")
    assert (router.db_for_read(User), router.db_for_write(User)) == ("default", "default")
    al = user("al", "decide_approval")
    agent = shop_agent("routed", {"tools": [call("refund", cents=5000)]})
    run = start_run(agent, "do it", "s1", actor=al, idempotency_key="k")
    assert sweep().waiting == 1
    assert not Run.objects.using("default").exists()
    found = Run.objects.get()  # as a project asks, that names no alias
    assert (found, found._state.db, found.owner, found.session.owner) == (run, "other", al, al)
    assert found.owner is not None and found.owner._state.db == "default"
    assert User.objects.get(pk=al.pk).agentruns_runs.get() == found
    assert Run(owner=al, session=Session.objects.get()).owner == al  # refused without the router
    settings.DATABASE_ROUTERS = ["agentruns.models.router.JournalRouter", UsersElsewhere()]
    assert router.db_for_read(User, instance=found) == "users"


class UsersElsewhere:
    """Another router of the project."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "users" if model is User else None


class Replicas:
    """Reads from a replica, and writes to where the journal is, what names no database."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica" if model._meta.app_label == "agentruns" else "default"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"


@pytest.fixture(params=["alone", "after ours"])
def replica(request: pytest.FixtureRequest, settings: Any) -> Iterator[None]:
    """A replica that nobody can reach: whoever asks it anything fails."""
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/nowhere/replica.sqlite3"}
    connections.settings["replica"] = connections.configure_settings({"default": database})["default"]
    ours = [JournalRouter()] if request.param == "after ours" else []
    settings.DATABASE_ROUTERS = [*ours, Replicas()]
    yield
    del connections["replica"], connections.settings["replica"]


@pytest.mark.django_db(transaction=True)
def test_nothing_is_asked_of_a_replica(replica: None, effects: Effects) -> None:
    boss = User.objects.create_superuser("boss")
    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    run = start_run(shop_agent("hosted", EVERYTHING), "do it", "s1", actor=boss, idempotency_key="k")
    assert sweep().waiting == 1
    card = Approval.objects.using("default").get()
    client = Client()
    client.force_login(boss)
    pages = [*admin_pages(run, card).values(), "/admin/", reverse("admin:agentruns_run_at", args=[run.pk])]
    assert [client.get(url).status_code for url in pages] == [200] * 6
    approve = reverse("admin:agentruns_approval_approve", args=[card.pk])
    assert client.post(approve, {"digest": card.digest, "reason": "fine"}).status_code == 302
    assert (sweep().completed, effects.count()) == (1, 4)
    assert [client.get(url).status_code for url in pages] == [200] * 6
    ask(Client(headers={"Authorization": f"Bearer {create_token(boss, SCOPES)[1]}"}), run, card)
    for words in (
        "list_runs", "show_run {}", "show_run {} --at=3", "fork_run {} --at=3 --text=more", "replay_run {}",
        "export_run {}", "resume_runs", "verify_journal", "prune_runs --session=s1",
    ):  # fmt: skip
        assert command(*words.format(run.pk).split()).code == 0, words


def ask(client: Client, run: Run, card: Approval) -> None:
    """Ask everything of the API, and be refused what is over."""
    of_run = [f"/api/runs/{run.pk}{rest}" for rest in ("", "/messages", "/state", "/events")]
    others = [f"/api/approvals/{card.pk}", "/api/approvals", "/api/runs", "/api/sessions/s1", "/api/health"]
    for path in [*of_run, *others]:
        response = client.get(path)
        assert response.status_code == 200, path
        assert b"".join(response) if response.streaming else response.content  # type: ignore[arg-type]
    for path, body, status in (
        (f"/api/runs/{run.pk}/cancel", {}, 409),
        (f"/api/approvals/{card.pk}/deny", {"digest": card.digest, "reason": "no"}, 409),
        (f"/api/runs/{run.pk}/orphans/x/resolve", {"verdict": "occurred"}, 404),
        (f"/api/runs/{run.pk}/fork", {"at": 3, "text": "and now?"}, 201),
    ):
        assert client.post(path, body, "application/json").status_code == status, path
