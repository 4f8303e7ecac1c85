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
from agentruns.services.approvals import links
from agentruns.services.sweep import sweep
from tests.admin.people import browser, user
from tests.admin.world import World, drifted, secretive, seen, timed
from tests.bells import WitnessBell
from tests.effects import Effects
from tests.statements import statement_wrapper

pytestmark = pytest.mark.django_db(transaction=True)

# Where it is posted, what, and the run that a worker is told of (None: the run that the request makes).
Post = tuple[str, dict[str, Any], Run | None]


def console(thing: Any, action: str, *args: Any, **data: Any) -> Post:
    url = reverse(f"admin:agentruns_{thing._meta.model_name}_{action}", args=[thing.pk, *args])
    run = thing if isinstance(thing, Run) else getattr(thing, "run", None)
    last = run.messages.latest("seq").seq if run else 0
    return url, {"reason": "because", "seq": last, **data}, run


def decision(approval: Approval, verb: str, **data: Any) -> Post:
    seen = approval.expires_at.isoformat() if approval.expires_at else ""
    return console(approval, verb, digest=approval.digest, seen=seen, **data)


def reply(approval: Approval) -> Post:
    key = str(approval.pk)
    data = {"verb": "approve", "_selected_action": key, f"digest-{key}": approval.digest, "reason": ""}
    return reverse("admin:agentruns_approval_turn", args=[approval.run_id]), data, approval.run


def about_a_call(run: Run, action: str) -> Post:
    call_id = run.messages.get(kind="orphan_found").call_id
    seq = run.messages.filter(call_id=call_id).latest("seq").seq
    return console(run, action, call_id, verdict="occurred", result="posted", evidence="seen", seq=seq)


def derivation(run: Run, action: str, **data: Any) -> Post:
    known = list(run.messages.filter(kind="tool_started").values_list("call_id", flat=True))
    return (*console(run, action, key="k", knows=known, **data)[:2], None)


def service(thing: Run | Approval, verb: str, **data: Any) -> Post:
    run, kind = (thing, "runs") if isinstance(thing, Run) else (thing.run, "approvals")
    digest = {} if isinstance(thing, Run) else {"digest": thing.digest}
    return f"/api/{kind}/{thing.pk}/{verb}", {**digest, **data}, run


def opened(approval: Approval) -> Post:
    link = links.sign(approval, links.MAIL, user("superuser"))
    return reverse("agentruns_decide", args=[link]), {"verb": "approve"}, approval.run


def verdict(run: Run) -> Post:
    call_id = run.messages.get(kind="orphan_found").call_id
    return service(run, f"orphans/{call_id}/resolve", verdict="occurred", result="posted")


def message(run: Run) -> Post:
    return f"/api/sessions/{run.session.key}/messages", {"content": "and more"}, run


CONSOLE: dict[str, list[Callable[[World], Post]]] = {
    "approval_approve": [lambda world: decision(world.waiting(), "approve")],
    "approval_edit": [lambda world: decision(world.waiting(), "edit", **{"argument-cents": "4000"})],
    "approval_answer": [lambda world: decision(world.waiting(), "answer", text="not this time")],
    "approval_turn": [lambda world: reply(world.waiting())],
    "run_resolve": [lambda world: about_a_call(world.orphaned(), "resolve")],
    "approval_deny": [lambda world: decision(world.waiting(), "deny")],
    "run_resume": [
        lambda world: console(world.paused(), "resume"),
        lambda world: console(world.orphaned(), "resume"),
    ],
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
SPAN = {"begins_at": "2030-01-01T08:00", "ends_at": "2030-01-02T08:00"}
# What these buttons do lets no run go on.
QUIET: dict[str, Callable[[World], Post]] = {
    "approval_extend": lambda world: decision(world.waiting(tools=[timed]), "extend", hours="4"),
    "approval_reveal": lambda world: console(world.waiting(), "reveal"),
    "run_pause": lambda world: console(world.waiting().run, "pause"),
    "apitoken_revoke": lambda world: (
        *console(create_token(user("decider"), ["runs:read"])[0], "revoke")[:2],
        world.completed(),
    ),
    "run_watch": lambda world: console(world.queued(), "watch"),
    "run_review": lambda world: console(world.completed(), "review", rating="1"),
    "run_export": lambda world: console(world.completed(), "export"),
    "run_replay": lambda world: console(world.completed(), "replay", who="code"),
    "run_erase": lambda world: console(world.completed(), "erase", 2),
    "/runs/{run_id}/rows/{seq}/erase": lambda world: service(
        world.completed(), "rows/2/erase", reason="asked for"
    ),
    "approval_absences": lambda world: (
        reverse("admin:agentruns_approval_absences"),
        {"delegate": user("decider").username, **SPAN},
        world.completed(),
    ),
    "run_switches": lambda world: (
        reverse("admin:agentruns_run_switches"),
        {"kind": "tool", "name": "paint", "state": "off", "reason": "no"},
        world.completed(),
    ),
    "run_raise": lambda world: console(world.paused(), "raise", max_steps="99"),
    "/runs/{run_id}/raise-budget": lambda world: service(world.paused(), "raise-budget", max_steps=99),
    "run_leave_out": lambda world: console(world.completed(), "leave_out", 2),
    "/runs/{run_id}/rows/{seq}/leave-out": lambda world: service(
        world.completed(), "rows/2/leave-out", reason="no"
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
        lambda world: service(world.waiting(), "approve"),
        lambda world: service(world.waiting(), "approve", arguments={"cents": 4000}),
    ],
    "/approvals/{approval_id}/deny": [lambda world: service(world.waiting(), "deny", reason="no")],
    "/approvals/{approval_id}/answer": [
        lambda world: service(world.waiting(), "answer", text="not this time", idempotency_key="k")
    ],
    "/runs/{run_id}/orphans/{call_id}/resolve": [lambda world: verdict(world.orphaned())],
    "/sessions/{path:key}/messages": [
        lambda world: message(world.queued()),
        lambda world: (*message(world.completed())[:2], None),
    ],
}
LINK = {"agentruns_decide": [lambda world: opened(world.waiting(tools=[secretive]))]}
POSTS = [
    (name, prepare)
    for table in (CONSOLE, API, LINK, {name: [prepare] for name, prepare in QUIET.items()})
    for name, prepares in table.items()
    for prepare in prepares
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
    elsewhere = {"run_deliver", "run_stop_waiting", "/events/{name}/{path:key}"}  # test_events.py
    verbs = ("dry-run", "activate", "stop", "retire", "backtest")
    elsewhere |= {"approval_draft_rule", "/rules", *(f"/rules/{{rule_id}}/{verb}" for verb in verbs)}
    listed = {*CONSOLE, *API, *QUIET, *elsewhere}
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


@pytest.mark.parametrize(("name", "prepare"), POSTS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(POSTS)])
def test_every_post(
    name: str,
    prepare: Callable[[World], Post],
    world: World,
    effects: Effects,
    bell: type[WitnessBell],
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:
    settings.AGENTRUNS_MAIL_LINK_SECONDS = 60
    path, body, run = prepare(world)
    client, inside, is_quiet = browser("superuser"), list[bool](), name in QUIET

    def watch(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        inside.extend([context["connection"].in_atomic_block] * ("agentruns_" in sql))
        return execute(sql, params, many, context)

    bell.rung.clear()
    acted, asked = effects.count(), Message.objects.filter(kind="assistant").count()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    with statement_wrapper(watch):
        response = client.post(path, body, content_type=kind_of(path))
    assert response.status_code in (200, 201, 204, 302), response.content
    assert inside
    assert is_quiet or all(inside), "in a transaction"
    assert (effects.count(), Message.objects.filter(kind="assistant").count()) == (acted, asked)
    before, run = run, Run.objects.get(pk=run.pk) if run else Run.objects.latest("created_at")
    rings = [] if is_quiet or run.is_ended else [(run.pk, True)]
    assert bell.rung == rings, "after the commit, and for whom it goes on"
    if is_quiet:
        assert run.status == ("paused" if name.endswith("pause") else before.status)
    else:
        sweep()
        run.refresh_from_db()
        assert run.status == ("cancelled" if "cancel" in name else "completed")
    assert problems(run.session_id) == []
