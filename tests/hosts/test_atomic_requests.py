"""With ATOMIC_REQUESTS every POST of the console and of the API works, rings late, and drives nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.db import connections
from django.test.client import MULTIPART_CONTENT
from django.urls import reverse

from agentruns.api import router
from agentruns.journal.verify import problems
from agentruns.models import ApiToken, Approval, Message, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from tests.admin.people import browser, user
from tests.admin.world import World, drifted, seen, timed
from tests.bells import WitnessBell
from tests.effects import Effects
from tests.statements import statement_wrapper

pytestmark = pytest.mark.django_db(transaction=True)

# Where it is posted, what, and the run that a worker is told of (None: the run that the request makes).
Post = tuple[str, dict[str, Any], Run | None]


def console(thing: Run | Approval, action: str, **data: Any) -> Post:
    url = reverse(f"admin:agentruns_{thing._meta.model_name}_{action}", args=[thing.pk])
    return url, {"reason": "because", **data}, thing if isinstance(thing, Run) else thing.run


def decision(approval: Approval, verb: str, **data: Any) -> Post:
    return console(approval, verb, digest=approval.digest, **data)


def more_time(approval: Approval) -> Post:
    assert approval.expires_at is not None
    return decision(approval, "extend", hours="4", seen=approval.expires_at.isoformat())


def reply(approval: Approval) -> Post:
    key = str(approval.pk)
    data = {"verb": "approve", "_selected_action": key, f"digest-{key}": approval.digest, "reason": ""}
    return reverse("admin:agentruns_approval_turn", args=[approval.run_id]), data, approval.run


def about_a_call(run: Run, action: str) -> Post:
    call_id = run.messages.get(kind="orphan_found").call_id
    seq = run.messages.filter(call_id=call_id).latest("seq").seq
    data = {"verdict": "occurred", "result": "posted", "evidence": "seen", "seq": seq}
    return reverse(f"admin:agentruns_run_{action}", args=[run.pk, call_id]), data, run


def resumption(run: Run) -> Post:
    return console(run, "resume", seq=run.messages.latest("seq").seq)


def revocation() -> str:
    token, _text = create_token(user("decider"), ["runs:read"])
    return reverse("admin:agentruns_apitoken_revoke", args=[token.pk])


def derivation(run: Run, action: str, **data: Any) -> Post:
    known = list(run.messages.filter(kind="tool_started").values_list("call_id", flat=True))
    return (*console(run, action, key="k", knows=known, **data)[:2], None)


def service(thing: Run | Approval, verb: str, **data: Any) -> Post:
    run = thing if isinstance(thing, Run) else thing.run
    return f"/api/{thing._meta.model_name}s/{thing.pk}/{verb}", data, run


def erasure(run: Run) -> Post:
    return reverse("admin:agentruns_run_erase", args=[run.pk, 2]), {"reason": "asked for"}, run


def verdict(run: Run) -> Post:
    call_id = run.messages.get(kind="orphan_found").call_id
    return service(run, f"orphans/{call_id}/resolve", verdict="occurred", result="posted")


def message(run: Run) -> Post:
    return f"/api/sessions/{run.session.key}/messages", {"content": "and more"}, run


def card(approval: Approval, verb: str, **data: Any) -> Post:
    return service(approval, verb, digest=approval.digest, **data)


CONSOLE: dict[str, list[Callable[[World], Post]]] = {
    "approval_approve": [lambda world: decision(world.waiting(), "approve")],
    "approval_edit": [lambda world: decision(world.waiting(), "edit", **{"argument-cents": "4000"})],
    "approval_answer": [lambda world: decision(world.waiting(), "answer", text="not this time")],
    "approval_turn": [lambda world: reply(world.waiting())],
    "run_resolve": [lambda world: about_a_call(world.orphaned(), "resolve")],
    "approval_deny": [lambda world: decision(world.waiting(), "deny")],
    "run_resume": [lambda world: resumption(world.paused()), lambda world: resumption(world.orphaned())],
    "run_cancel": [
        lambda world: console(world.waiting().run, "cancel"),
        lambda world: console(world.queued(), "cancel"),
    ],
    "run_adopt": [lambda world: console(run := drifted(world), "adopt", **seen(run))],
    "run_reply": [
        lambda world: console(world.queued(), "reply", key="k", text="and more"),
        lambda world: (*console(world.completed(), "reply", key="k", text="and more")[:2], None),
    ],
    "run_again": [lambda world: derivation(world.completed(), "again")],
    "run_start": [
        lambda world: (
            reverse("admin:agentruns_run_start"),
            {"agent": world.completed().agent, "text": "more", "key": "k"},
            None,
        )
    ],
    "run_fork": [lambda world: derivation(world.completed(), "fork", at="1", text="and now?")],
}
# What these buttons do lets no run go on.
QUIET: dict[str, Callable[[World], Post]] = {
    "approval_extend": lambda world: more_time(world.waiting(tools=[timed])),
    "approval_reveal": lambda world: console(world.waiting(), "reveal"),
    "run_pause": lambda world: console(world.waiting().run, "pause"),
    "apitoken_revoke": lambda world: (revocation(), {}, world.completed()),
    "run_watch": lambda world: console(world.queued(), "watch"),
    "run_review": lambda world: console(world.completed(), "review", rating="1"),
    "run_export": lambda world: console(world.completed(), "export"),
    "run_replay": lambda world: console(world.completed(), "replay", who="code"),
    "run_erase": lambda world: erasure(world.completed()),
    "/runs/{run_id}/rows/{seq}/erase": lambda world: service(
        world.completed(), "rows/2/erase", reason="asked for"
    ),
    "run_switches": lambda world: (
        reverse("admin:agentruns_run_switches"),
        {"kind": "tool", "name": "paint", "state": "off", "reason": "no"},
        world.completed(),
    ),
    "run_verify": lambda world: console(world.completed(), "verify"),
    "run_reveal": lambda world: about_a_call(world.orphaned(), "reveal"),
    "/runs/{run_id}/pause": lambda world: service(world.waiting().run, "pause", reason="lunch"),
}
API: dict[str, list[Callable[[World], Post]]] = {
    "/runs": [
        lambda world: (
            "/api/runs",
            {"agent": world.completed().agent, "input": "more", "session": "s2"},
            None,
        )
    ],
    "/runs/{run_id}/resume": [
        lambda world: service(world.paused(), "resume"),
        lambda world: service(world.orphaned(), "resume"),
    ],
    "/runs/{run_id}/cancel": [
        lambda world: service(world.waiting().run, "cancel"),
        lambda world: service(world.queued(), "cancel", reason="no"),
    ],
    "/runs/{run_id}/fork": [
        lambda world: (f"/api/runs/{world.completed().pk}/fork", {"at": 2, "session": "s2"}, None)
    ],
    "/approvals/{approval_id}/approve": [
        lambda world: card(world.waiting(), "approve"),
        lambda world: card(world.waiting(), "approve", arguments={"cents": 4000}),
    ],
    "/approvals/{approval_id}/deny": [lambda world: card(world.waiting(), "deny", reason="no")],
    "/approvals/{approval_id}/answer": [
        lambda world: card(world.waiting(), "answer", text="not this time", idempotency_key="k")
    ],
    "/runs/{run_id}/orphans/{call_id}/resolve": [lambda world: verdict(world.orphaned())],
    "/sessions/{path:key}/messages": [
        lambda world: message(world.queued()),
        lambda world: (*message(world.completed())[:2], None),
    ],
}
POSTS = [
    (name, prepare) for table in (CONSOLE, API) for name, prepares in table.items() for prepare in prepares
]


def test_these_are_all_the_posts_there_are() -> None:
    """A new button or endpoint has to be added above."""
    offered = {
        str(url.name).removeprefix("agentruns_")
        for model in (Run, Approval, ApiToken)
        for url in admin.site._registry[model].get_urls()
        if url.name is not None
    }
    pages = {
        "row", "content", "file", "call", "live", "at", "news", "figures", "costs", "csv", "in_doubt",
        "changelist", "add", "history", "delete", "change",
    }  # fmt: skip
    listed = {*CONSOLE, *API, *QUIET}
    assert {name for name in offered if name.partition("_")[2] not in pages} == {
        name for name in listed if not name.startswith("/")
    }
    posts = {
        path
        for path, view in router.path_operations.items()
        if any(operation.methods == ["POST"] for operation in view.operations)
    }
    assert posts == {name for name in listed if name.startswith("/")}


def kind_of(path: str) -> str:
    return "application/json" if path.startswith("/api/") else MULTIPART_CONTENT


class Watch:
    """Sees whether statements on our tables are in a transaction."""

    def __init__(self) -> None:
        self.inside: list[bool] = []

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if "agentruns_" in sql:
            self.inside.append(context["connection"].in_atomic_block)
        return execute(sql, params, many, context)


@pytest.mark.parametrize(("name", "prepare"), POSTS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(POSTS)])
def test_every_post(
    name: str,
    prepare: Callable[[World], Post],
    world: World,
    effects: Effects,
    bell: type[WitnessBell],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, body, run = prepare(world)
    client, watch = browser("superuser"), Watch()
    bell.rung.clear()
    acted, asked = effects.count(), Message.objects.filter(kind="assistant").count()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    with statement_wrapper(watch):
        response = client.post(path, body, content_type=kind_of(path))
    assert response.status_code in (200, 201, 302), response.content
    assert watch.inside
    assert all(watch.inside)
    assert (effects.count(), Message.objects.filter(kind="assistant").count()) == (acted, asked)
    run = Run.objects.get(pk=run.pk) if run else Run.objects.latest("created_at")
    assert bell.rung == ([] if run.is_ended else [(run.pk, True)]), (
        "after the commit, and for whom it goes on"
    )
    sweep()
    run.refresh_from_db()
    assert run.status == ("cancelled" if "cancel" in name else "completed")
    assert problems(run.session_id) == []


@pytest.mark.parametrize("name", QUIET)
def test_every_post_that_lets_nothing_go_on(
    name: str, world: World, bell: type[WitnessBell], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body, run = QUIET[name](world)
    assert run is not None
    bell.rung.clear()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    response = browser("superuser").post(path, body, content_type=kind_of(path))
    assert response.status_code in (200, 204, 302), response
    status = "paused" if name.endswith("pause") else run.status
    assert (bell.rung, Run.objects.get(pk=run.pk).status) == ([], status)
    assert problems(run.session_id) == []
