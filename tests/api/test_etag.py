"""A run that has not changed is not sent again; one that has is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.api import runs
from agentruns.engine.leases import claim
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def run(shop: Agent, owner: Any) -> Run:
    return start_run(shop, "refund", "s1", actor=owner)


def asked(api: Api, run: Run, tag: str | None = None) -> tuple[int, str]:
    """Ask for a run and return the status and the tag of the answer."""
    response = api.client.get(f"/api/runs/{run.pk}", headers={"If-None-Match": tag} if tag else {})
    assert response["Cache-Control"] == "private, no-cache"
    assert bool(response.content) == (response.status_code == 200)
    return response.status_code, response["ETag"]


def test_what_is_known_is_neither_built_nor_sent(api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, tag = asked(api, run)
    assert (status, tag[:3], tag[-1]) == (200, 'W/"', '"')
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunOut, "of", None)  # whoever builds a body fails
        for known in (tag, tag.removeprefix("W/"), f'"x", {tag}', "*"):
            assert asked(api, run, known) == (304, tag)
    for other in ('"x"', 'W/"', "\x7f", tag.strip('W/"')):
        assert asked(api, run, other) == (200, tag)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: sweep(),
        lambda run: claim("default", run.pk),
        lambda run: Run.objects.filter(pk=run.pk).update(blocked_reason="nobody serves it"),
        lambda run: Run.objects.filter(pk=run.pk).update(attempts=1),
    ],
    ids=["driven", "leased", "blocked", "attempted"],
)
def test_what_has_changed_is_sent(api: Api, run: Run, change: Callable[[Run], Any]) -> None:
    _, tag = asked(api, run)
    change(run)
    status, new = asked(api, run, tag)
    assert (status, new != tag) == (200, True)


def test_a_tag_opens_nothing_and_nothing_else_is_kept(api: Api, run: Run) -> None:
    _, tag = asked(api, run)
    stranger = Api(make_user("other")).client
    assert stranger.get(f"/api/runs/{run.pk}", headers={"If-None-Match": tag}).status_code == 404
    for path in (
        "/runs",
        "/approvals",
        "/agents",
        "/sessions/s1",
        "/health",
        f"/runs/{run.pk}/state",
        "/runs/x",
    ):
        api.get(path)
        assert (api.response["Cache-Control"], "ETag" in api.response) == ("private, no-store", False)
    api.post(f"/runs/{run.pk}/cancel")
    assert api.response["Cache-Control"] == "private, no-store"
