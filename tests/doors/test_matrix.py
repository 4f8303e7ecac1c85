"""Every door and everybody who may knock: who is let in, who changes what, and what nobody reads.

Doors are found in the URL confs and among the commands; one that no rule below names fails the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import Client

import agentruns
from agentruns import Image, Pending, Policy, Text, run_agent, session_token, start_run, tool
from agentruns.api import router
from agentruns.journal.policy import ACTIONS
from agentruns.models import (
    ApiToken,
    Approval,
    ApprovalRule,
    Event,
    Message,
    Review,
    RuleChange,
    Run,
    Session,
)
from agentruns.services import rules
from agentruns.services.api_tokens import create_token
from agentruns.urls import urlpatterns
from tests.admin.world import dying
from tests.pictures import png
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db

SECRET = "lamp-7731"  # in texts of the owner's runs, which others do not read
SAID = "sofa-1942"  # in those of the one that has ended
PIN = "pin-5520"  # sensitive, so that nobody reads it who may not reveal it
LOGIN = "/admin/login/"
READING = ("SELECT", "SAVEPOINT", "RELEASE SAVEPOINT")  # how statements begin that write nothing

SIGNED = {"nobody", "owner", "viewer", "decider", "stranger", "superuser"}
NEEDS = {"viewer": ["view_run", "view_approval"], "decider": ["decide_approval"]}


class Token(NamedTuple):
    """Whose token it is, and its scopes."""

    whose: str
    scopes: list[str]


READ, WRITE, DECIDE = "runs:read", "runs:write", "approvals:decide"
ACTS, CONFIRMS, POOR, IDLE = "runs:act_for", "approvals:own", "every scope of nobody", "scopes of no use"
EVENTS, RULES = "events:write", "rules:write"
TOKENS = {
    **{scope: Token("superuser", [scope]) for scope in (READ, WRITE, DECIDE, EVENTS, RULES)},
    ACTS: Token("superuser", [WRITE, ACTS]),
    CONFIRMS: Token("owner", [CONFIRMS]),
    POOR: Token("nobody", list(ApiToken.Scope.values)),
    # Who owns none of the runs has none to confirm, and acting for others alone starts nothing.
    IDLE: Token("superuser", [CONFIRMS, ACTS]),
}
# A visitor of the session whose run waits, and one of another session, for whom the first is somebody else's.
VISITOR, OTHER = "visitor", "other visitor"
VISITED = {VISITOR: "s1", OTHER: "s0"}
BEARERS = [*TOKENS, *VISITED]
WHO = ["anonymous", *sorted(SIGNED), *BEARERS]


# Of a request, of a session, and of an approval.
ABOUT_NO_USER = ("has_second_factor", "impersonator", "visitor_quota", "without_console")


class Wary(Policy):
    """The default rules, which note about whom they are asked: never about anybody but an active user."""

    strangers: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ABOUT_NO_USER or not callable(found):
            return found

        def asked(user: Any, *about: Any) -> Any:
            is_program = user is None and name == "scope"
            if not is_program and not (isinstance(user, User) and user.is_active):
                self.strangers.append(f"{name}({user!r})")
            return found(user, *about)

        return asked


class Tenants(Wary):
    """A user sees their own, whatever permissions they have."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_id=user.pk)


def client_of(who: str, settings: Any) -> Client:
    """Return the client of somebody; the policy is theirs."""
    settings.AGENTRUNS_POLICY = f"{__name__}.{'Tenants' if who == 'stranger' else 'Wary'}"
    if who == "anonymous":
        return Client()
    if who in TOKENS:
        whose, scopes = TOKENS[who]
        return bearing(create_token(person(whose), scopes)[1])
    if who in VISITED:
        session = Session.objects.get(key=VISITED[who])
        return bearing(session_token(session, timedelta(minutes=5)))
    user = person(who)
    if who == "stranger":
        start_run("gated", "mine", "s3", actor=user)
    client = Client()
    client.force_login(user)
    return client


def bearing(token: str) -> Client:
    return Client(headers={"Authorization": f"Bearer {token}"})


def person(name: str) -> User:
    """Return a user with what they need: a stranger has every permission, and all but owners are staff."""
    if name == "superuser":
        return User.objects.get(username=name)
    user, _made = User.objects.get_or_create(username=name)
    ours = Permission.objects.filter(content_type__app_label="agentruns")
    user.user_permissions.set(ours if name == "stranger" else ours.filter(codename__in=NEEDS.get(name, [])))
    User.objects.filter(pk=user.pk).update(is_staff=name != "owner")
    return User.objects.get(pk=user.pk)


# action -> who may do it through the API; for people also through the console, if they are staff
API = {
    "look in": {*WHO},
    "list agents": {*SIGNED, READ, POOR},
    "list": {*SIGNED, READ, POOR, *VISITED},
    "list approvals": {*SIGNED, READ, DECIDE, POOR, *VISITED},
    "see": {"owner", "viewer", "superuser", READ, VISITOR},
    "see state": {"owner", "viewer", "superuser", READ},
    "see approval": {"owner", "viewer", "decider", "superuser", READ, DECIDE},
    "see own approval": {"owner", "viewer", "decider", "superuser", READ, DECIDE, VISITOR},
    "reveal": {"superuser", READ, DECIDE},
    "start": {*SIGNED, WRITE, ACTS, POOR, OTHER},
    "start what is for some": {"superuser", "stranger", WRITE, ACTS},
    "write into the owner's session": {"owner", OTHER},
    "act for the owner": {"owner", "superuser", "stranger", ACTS},
    "act in a scope": {"superuser", "stranger", ACTS},
    "fork for the owner": {"owner", "superuser", ACTS},
    "fork into a scope": {"superuser", ACTS},
    "fork with what is for some": {"superuser", WRITE, ACTS},
    "do with one's own": {"owner", "superuser", WRITE, ACTS},
    "say something": {"owner", "superuser", WRITE, ACTS, VISITOR},
    "operate": {"superuser", WRITE, ACTS},
    "decide": {"decider", "superuser", DECIDE},
    "confirm": {"owner", CONFIRMS, VISITOR},
    "deliver": {"superuser", "stranger", EVENTS},
    "deliver elsewhere": {"superuser", "stranger"},
    "list rules": {*SIGNED, READ, POOR},
    "see a rule": {"superuser", "stranger", READ},
    "write rules": {"superuser", "stranger", RULES},
    "write rules elsewhere": {"superuser", RULES},
    "deny what another confirms": {"decider", "superuser", DECIDE, "owner", CONFIRMS, VISITOR},
    "nothing": set[str](),
}
CONSOLE = {
    **{key: {"stranger", "superuser"} for key in ("list tokens", "see switches", "rules")},
    **{
        key: {"superuser"}
        for key in ("do with one's own", "operate", "reveal", "see token", "revoke", "switch")
    },
    **{key: set[str]() for key in ("nothing", "Django's")},
    "list": {"viewer", "stranger", "superuser"},
    "list approvals": {"viewer", "decider", "stranger", "superuser"},
    "see": {"viewer", "superuser"},
    "see approval": {"viewer", "decider", "superuser"},
    "decide": {"decider", "superuser"},
}


class Rule(NamedTuple):
    """Who is let in, and who changes something; `body` of a POST."""

    enter: str
    act: str = "nothing"
    body: Any = None


TASK = {"agent": "spoken", "input": "hi"}
FORK = {"at": 2}
DRAFT = {
    "name": "new", "agent": "gated", "tool": "pay",
    "conditions": [{"path": "arguments.note", "op": "==", "value": "x"}],
}  # fmt: skip
OWNS = "do with one's own"
# A door is "METHOD path", and another "METHOD path option=" for each option that is not among HARMLESS.
# An approval is `approval`, which people decide, or `own`, which the requester confirms.
API_RULES = {
    "GET agents": Rule("list agents"),
    "GET health": Rule("look in"),
    "POST runs": Rule("start", "start", TASK),
    "POST runs agent=": Rule("start what is for some", "start what is for some", TASK),
    "POST runs session=": Rule("write into the owner's session", "write into the owner's session", TASK),
    "POST runs owner=": Rule("act for the owner", "act for the owner", TASK),
    "POST runs scope=": Rule("act in a scope", "act in a scope", TASK),
    "POST runs context=": Rule("nothing", "nothing", TASK),
    "POST runs/{run}/fork": Rule(OWNS, OWNS, FORK),
    "POST runs/{run}/fork agent=": Rule("fork with what is for some", "fork with what is for some", FORK),
    "POST runs/{run}/fork session=": Rule(OWNS, "nothing", FORK),  # which is there
    "POST runs/{run}/fork owner=": Rule("fork for the owner", "fork for the owner", FORK),
    "POST runs/{run}/fork scope=": Rule("fork into a scope", "fork into a scope", FORK),
    "POST runs/{run}/fork context=": Rule("nothing", "nothing", FORK),
    "POST runs/{run}/cancel": Rule(OWNS, OWNS, {}),
    "POST runs/{run}/pause": Rule(OWNS, OWNS, {}),
    "POST runs/{orphan}/resume": Rule("operate", "operate", {}),
    "POST runs/{orphan}/orphans/{call}/resolve": Rule("operate", "operate", {"verdict": "unknown"}),
    "POST runs/{run}/raise-budget": Rule("operate", "operate", {"max_steps": 99}),
    "POST runs/{ended}/rows/2/erase": Rule("operate", "operate", {"reason": "no"}),
    "POST runs/{ended}/rows/2/leave-out": Rule("operate", "operate", {}),
    "POST sessions/{session}/messages": Rule("say something", "say something", {"content": "hi"}),
    "POST sessions/{session}/messages scope=": Rule("nothing", "nothing", {"content": "hi"}),
    "POST sessions/{session}/messages agent=": Rule("nothing", "nothing", {"content": "hi"}),  # it is busy
    "GET approvals": Rule("list approvals"),
    "GET approvals/{approval}": Rule("see approval"),
    "GET approvals/{approval} reveal=": Rule("reveal"),
    "POST approvals/{approval}/approve": Rule("decide", "decide", {}),
    "POST approvals/{approval}/approve arguments=": Rule("decide", "decide", {}),
    "POST approvals/{approval}/deny": Rule("decide", "decide", {"reason": "no"}),
    "POST approvals/{approval}/answer": Rule("decide", "decide", {"text": "no"}),
    "GET approvals/{own}": Rule("see own approval"),
    "GET approvals/{own} reveal=": Rule("reveal"),
    "POST approvals/{own}/approve": Rule("confirm", "confirm", {}),
    "POST approvals/{own}/approve arguments=": Rule("nothing", "nothing", {}),
    "POST approvals/{own}/deny": Rule(*["deny what another confirms"] * 2, {"reason": "no"}),
    "POST approvals/{own}/answer": Rule("nothing", "nothing", {"text": "no"}),  # it asks no question
    **{
        f"GET runs{option}": Rule("list")
        for option in ("", " agent=", " session=", " parent=", " context=", " scope=")
    },
    **{f"GET sessions{option}": Rule("list") for option in ("", " scope=")},
    **{f"GET runs/{{run}}{part}": Rule("see") for part in ("", "/messages", "/events")},
    **{f"GET sessions/{{session}}{part}": Rule("see") for part in ("", "/messages")},
    **{
        f"GET sessions/{{session}}{part} scope=": Rule("nothing") for part in ("", "/messages")
    },  # it has none
    **{
        f"GET runs/{{run}}/{part}": Rule("see state")
        for part in ("messages/{seq}/content", "files/{sha256}", "state")
    },
    "POST events/{name}/{session}": Rule("deliver", "deliver", {}),
    "POST events/{name}/{session} scope=": Rule("deliver elsewhere", "deliver elsewhere", {}),
    **{f"GET rules{option}": Rule("list rules") for option in ("", " agent=")},
    "GET rules/{active}": Rule("see a rule"),
    "POST rules": Rule("write rules", "write rules", DRAFT),
    "POST rules agent=": Rule("nothing", "nothing", DRAFT),  # which has no such tool
    "POST rules scope=": Rule("write rules elsewhere", "write rules elsewhere", DRAFT),
    **{
        f"POST rules/{{active}}/{act}": Rule("write rules", "write rules", {})
        for act in ("dry-run", "stop", "retire")
    },
    "POST rules/{draft}/activate": Rule("write rules", "write rules", {}),
    "POST rules/{active}/backtest": Rule("write rules", "nothing", {}),
    # Pages about the API, which tell of no run.
    **dict.fromkeys(("GET openapi.json", "GET docs", "GET "), Rule("look in")),
}
HARMLESS = {
    "idempotency_key", "key", "digest", "reason", "text", "input", "at", "after", "last_event_id", "cursor",
    "status", "verdict", "result", "evidence", "content", "not_before", "priority", "block",
    "name", "tool", "effect", "conditions", "caps", "untrusted", "expires_at", "most",
    "payload", "max_steps", "token_budget", "cost_budget", "deadline",
}  # fmt: skip
RUN_POSTS = {
    **dict.fromkeys(("again", "fork", "pause", "cancel", "reply"), "do with one's own"),
    **dict.fromkeys(("resume", "adopt", "resolve", "erase", "review", "leave_out", "raise"), "operate"),
    **dict.fromkeys(("deliver", "stop_waiting"), "operate"),
    "reveal": "reveal",
}

DECISIONS = ("approve", "edit", "answer", "deny", "extend")
CONSOLE_POSTS = {
    "run": RUN_POSTS,
    "approval": {**dict.fromkeys(DECISIONS, "decide"), "reveal": "reveal", "draft_rule": "nothing"},
    "apitoken": {"revoke": "revoke"},
    "approvalrule": dict.fromkeys(("try", "activate", "stop", "retire", "backtest"), "rules"),
}
READS = {
    "run": {
        "live", "watch", "row", "content", "file", "at", "replay", "call", "verify", "export", "history",
        "change",
    },
    "approval": {"turn", "history", "change"},
    "apitoken": {"history", "change"},
    "approvalrule": {"history", "change"},
}  # fmt: skip
ABOUT_A_LIST = {"news", "figures", "start", "costs", "csv", "in_doubt", "switches", "absences"}
LISTS = {"run": "list", "approval": "list approvals", "apitoken": "list tokens", "approvalrule": "rules"}
SEES = {"run": "see", "approval": "see approval", "apitoken": "see token", "approvalrule": "rules"}
# In a shell the program acts, or the person that --user names.
SHELL = {
    "create_api_token", "drain_runs", "erase", "export_run", "fork_run", "import_run", "list_runs",
    "lock_mcp_tools", "prune_runs", "replay_run", "resume_runs", "show_run", "verify_journal",
    "run_agent", "check_runs", "adopt_runs", "list_rules", "backtest_rule", "stop_rule",
    "send_digest",
}  # fmt: skip
AS_USER = {"approve_call": [], "deny_call": ["--reason", "no"]}


@tool(requires_approval=True, sensitive=["pin"])
def pay(note: str, pin: str) -> str:
    """Pay."""
    return "paid"


@tool(requires_approval=True, approvers="requester", sensitive=["pin"])
def cancel(note: str, pin: str) -> str:
    """Cancel the order."""
    return "cancelled"


@tool(awaits="payment")
def charge(note: str) -> Pending:
    """Ask the customer to pay."""
    return Pending(note)


PHOTO = png(note=SECRET.encode())


class Ids(NamedTuple):
    """What the doors lead to."""

    run: str
    orphan: str
    call: str
    approval: str
    own: str
    session: str
    token: str
    ended: str
    waiter: str
    awaited: str
    active: str
    draft: str
    owner: str
    digests: dict[str, str]
    seq: str = "1"
    sha256: str = sha256(PHOTO).hexdigest()
    name: str = "payment"  # of an event
    rule: str = ""


KEYS = Ids._fields[: Ids._fields.index("owner")]
MISSING = "01a20189-67e9-70a1-9b0c-1b07670a3b0b"


@pytest.fixture
def ids() -> Ids:
    """The owner's runs: that wait for two decisions, a verdict and an event, and one that has ended."""
    Wary.strangers.clear()
    owner, boss = User.objects.create_user("owner"), User.objects.create_superuser("superuser")
    asks = [call(name, note=SECRET, pin=PIN) for name in ("pay", "cancel")]
    gated = shop_agent("gated", {"tools": asks}, tools=[pay, cancel])
    shop_agent("closed", {"text": "done"}, starters=None)
    orphaned = shop_agent("orphaned", {"tools": [call("dies")]}, tools=[dying()])
    waiting = run_agent(gated, [Text(f"buy {SECRET}"), Image(data=PHOTO)], "s1", actor=owner)
    doubt = run_agent(orphaned, f"buy {SECRET}", "s2", actor=owner)
    card, own = sorted(waiting.pending, key=lambda one: one.tool_name, reverse=True)
    token, _text = create_token(boss, [READ], name=SECRET)
    spoken = shop_agent("spoken", {"text": SAID})
    ended = run_agent(spoken, f"say {SAID}", "s0", actor=owner).run_id
    till = shop_agent("till", {"tools": [call("charge", note=SECRET)]}, tools=[charge])
    waiter = run_agent(till, f"sell {SECRET}", "s4", actor=owner).run_id
    its = (waiter, Message.objects.get(run=waiter, kind="event_awaited").call_id)
    found = (waiting.run_id, doubt.run_id, doubt.orphans[0], card.pk, own.pk, waiting.session_key)
    digests = {"approval": card.digest, "own": own.digest}
    note = {"path": "arguments.note", "op": "==", "value": "lamp"}
    rule = rules.draft_rule(None, name="small", agent="gated", tool="pay", conditions=[note])
    rules.try_rule(rule.pk, None)
    active, draft = (rules.draft_rule(None, **{**DRAFT, "name": name}) for name in ("active", "draft"))
    rules.activate_rule(active.pk, None)
    others = (active.pk, draft.pk, owner.pk)
    return Ids(*map(str, (*found, token.pk, ended, *its, *others)), digests, rule=str(rule.pk))


MODELS = (Run, Approval, Message, ApiToken, Review, Event, ApprovalRule, RuleChange)


def rows() -> Any:
    """Read the tables as they are: the models would take a third of the time of all doors."""
    tables = [model._meta for model in MODELS]
    with connection.cursor() as cursor:
        return [
            cursor.execute(f"SELECT * FROM {table.db_table} ORDER BY {table.pk.column}").fetchall()
            for table in tables
        ]


class Answer(NamedTuple):
    """What a door answered, and whether anything was written."""

    status: int
    text: str
    wrote: bool


def knock(client: Client, method: str, path: str, body: Any, before: Any) -> Answer:
    """Ask, and undo what it did; `before` are the rows that everybody finds."""
    statements: list[str] = []

    def note(execute: Any, sql: str, *how: Any) -> Any:
        statements.append(sql)
        return execute(sql, *how)

    with transaction.atomic(), connection.execute_wrapper(note):
        options: dict[str, Any] = {}
        if path.startswith("/api/") and method == "POST":
            options = {"data": json.dumps(body), "content_type": "application/json"}
        elif method == "POST":
            options = {"data": body}
        response: Any = client.generic("GET", path) if method == "GET" else client.post(path, **options)
        stream = response.streaming and "event-stream" in response["Content-Type"]
        content = b"" if stream else response.getvalue()
        status = response.status_code
        if status == 302 and response["Location"].startswith(LOGIN):
            status = 401
        # To compare all rows takes longer than to answer.
        wrote = not all(sql.startswith(READING) for sql in statements) and rows() != before
        transaction.set_rollback(True)
    return Answer(status, content.decode(errors="replace"), wrote)


def leaves(patterns: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        path = prefix + str(pattern.pattern)
        if hasattr(pattern, "url_patterns"):
            yield from leaves(pattern.url_patterns, path)
        else:
            yield path, pattern


def api_doors() -> list[str]:
    """Return every operation and every other URL of the ready-made API, as API_RULES names them."""
    operations = {}
    for path, view in router.path_operations.items():
        for one in view.operations:
            for method in one.methods:
                operations[method, path.strip("/").replace("{path:", "{")] = one
    found = set()
    for path, _pattern in leaves(urlpatterns):
        plain = re.sub("<(?:path:)?(\\w+)>", "{\\1}", path)
        here = {method: one for (method, where), one in operations.items() if where == plain}
        for method, one in here.items():
            found |= {f"{method} {plain}{option}" for option in ("", *options_of(one))}
        found |= set() if here else {f"GET {plain}"}
    doors = {our_name(door) for door in found}
    return sorted(doors | {door.replace("{approval}", "{own}") for door in doors})


def options_of(operation: Any) -> set[str]:
    """Return " name=" of what a caller may ask of an operation, and what could change who may."""
    names = set()
    for model in operation.models:
        for name, field in model.model_fields.items():
            annotations = get_args(field.annotation) or [field.annotation]
            bodies = [getattr(one, "model_fields", {}) for one in annotations]
            if model.__ninja_param_source__ != "path":
                names |= {name} if not any(bodies) else {each for body in bodies for each in body}
    return {f" {name}=" for name in names - HARMLESS}


def our_name(door: str) -> str:
    """Return a door under the names of Ids."""
    path = door.replace("{run_id}", "{run}").replace("{approval_id}", "{approval}")
    path = path.replace("{call_id}", "{call}").replace("{key}", "{session}")
    path = path.replace("{rule_id}", "{draft}" if path.endswith("/activate") else "{active}")
    if path.endswith(("/resume", "/resolve")):
        path = path.replace("{run}", "{orphan}")
    if path.endswith(("/erase", "/leave-out")):
        path = path.replace("{run}", "{ended}").replace("{seq}", "2")  # the task
    return path


def console_doors() -> list[tuple[str, str, str]]:
    """Return the model, the name and the path of every URL of our pages in the admin."""
    found = []
    for model, model_admin in admin.site._registry.items():
        if model._meta.app_label != "agentruns":
            continue
        for pattern in model_admin.get_urls():
            name = (pattern.name or "").removeprefix(f"agentruns_{model._meta.model_name}_")
            found.append((str(model._meta.model_name), name, str(pattern.pattern)))
    return found


def test_there_is_a_rule_for_each_door_and_a_door_for_each_rule() -> None:
    assert api_doors() == sorted(API_RULES)
    assert {scope for token in TOKENS.values() for scope in token.scopes} == set(ApiToken.Scope.values)
    for model, name, path in console_doors():
        known = {"changelist", "add", "delete", ""} | ABOUT_A_LIST | READS[model] | set(CONSOLE_POSTS[model])
        assert name in known, f"who may enter admin/{model}/{path}?"
    folder = Path(agentruns.__file__).parent / "management/commands"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == SHELL | set(AS_USER)


def judge(
    answer: Answer, who: str, door: str, *, enters: bool, acts: bool, sees: bool, reveals: bool
) -> None:
    said = f"{who} at {door}: {answer.status} {answer.text[:300]}"
    assert answer.status < 500, said
    if enters:
        assert answer.status not in (401, 403), said
    else:
        assert answer.status in (401, 403, 404, 302, 400, 409), said  # the last: to who may see it
    assert acts or not answer.wrote, f"wrote: {said}"
    known = {VISITOR: SECRET, OTHER: SAID}.get(who)
    hidden = [] if sees and who not in VISITED else [each for each in (SECRET, SAID) if each != known]
    assert not [each for each in hidden if each in answer.text], f"told: {said}"
    assert reveals or PIN not in answer.text, f"revealed: {said}"
    assert Wary.strangers == [], f"the policy was asked: {said}"


def sent(door: str, rule: Rule, ids: Ids) -> tuple[str, Any]:
    """Return the path and the body that somebody sends."""
    path, _, option = door.partition(" ")[2].partition(" ")
    given = {
        "owner": ids.owner, "scope": "elsewhere", "context": {"tenant": 8}, "agent": "closed",
        "session": "s0", "parent": ids.run, "arguments": {"note": "other", "pin": "other"}, "reveal": "true",
    }  # fmt: skip
    asked = {name: given[name] for name in [option.rstrip("=")] if name}
    where = "/api/" + path.format(**ids._asdict())
    if rule.body is None or path.startswith("events/"):
        return where + ("?" + urlencode(asked) if asked else ""), rule.body
    card = next((ids.digests[name] for name in ids.digests if f"{{{name}}}" in path), None)
    return where, {**rule.body, **asked, **({"digest": card} if card else {})}


@pytest.mark.parametrize("who", WHO)
def test_the_api(who: str, ids: Ids, settings: Any) -> None:
    client = client_of(who, settings)
    missing, before = ids._replace(**dict.fromkeys(KEYS, MISSING)), rows()
    for door, rule in API_RULES.items():
        method = door.partition(" ")[0]
        answer = knock(client, method, *sent(door, rule, ids), before)
        enters, acts = who in API[rule.enter], who in API[rule.act]
        sees = acts or who in API["see own approval"]
        reveals = enters and rule.enter == "reveal"
        judge(answer, who, door, enters=enters, acts=acts, sees=sees, reveals=reveals)
        assert PIN in answer.text or not reveals, (who, door)
        if acts:
            assert (answer.status in (200, 201), answer.wrote) == (True, True), (who, door, answer)
        if who in ("stranger", OTHER) and not enters and "{" in door:
            other = knock(client, method, *sent(door, rule, missing), before)
            assert answer.status == other.status in (403, 404), door
            assert without_ids(answer.text, ids) == without_ids(other.text, missing), door


def without_ids(text: str, ids: Ids) -> str:
    for each in KEYS:
        text = text.replace(getattr(ids, each), "ID")
    return text


@pytest.mark.parametrize("who", ["anonymous", *sorted(SIGNED)])
def test_the_console(who: str, ids: Ids, settings: Any) -> None:
    client = client_of(who, settings)
    before = rows()
    for model, name, route in console_doors():
        for card in ("approval", "own") if name in CONSOLE_POSTS["approval"] else ("approval",):
            path = console_path(model, name, route, ids._replace(approval=getattr(ids, card)))
            for method in ("GET", "POST"):
                rule = rule_of(model, name, method, card)
                answer = knock(client, method, path, console_data(ids, card), before)
                enters, acts = who in CONSOLE[rule.enter], who in CONSOLE[rule.act]
                sees = who in CONSOLE["see approval"] | ({"stranger"} if model == "apitoken" else set())
                door = f"{method} {path}"
                if rule.enter == "Django's":  # own pages to add and delete refuse, or lead back
                    enters = answer.status not in (401, 403)
                reveals = method == "POST" and who in CONSOLE["reveal"]
                judge(answer, who, door, enters=enters, acts=acts, sees=sees, reveals=reveals)
                if not enters and who == "stranger" and rule.enter not in ("Django's", "switch"):
                    assert answer.status in (404, 302), door


def test_no_token_opens_a_page(ids: Ids, settings: Any) -> None:
    clients = {who: client_of(who, settings) for who in BEARERS}
    before = rows()
    for model, name, route in console_doors():
        path = console_path(model, name, route, ids)
        for who, client in clients.items():
            for response in (client.get(path), client.post(path, console_data(ids))):
                assert response.status_code == 302, (who, path)
                assert response["Location"].startswith(LOGIN), (who, path)
    assert rows() == before


def console_path(model: str, name: str, route: str, ids: Ids) -> str:
    key = {"run": ids.run, "approval": ids.approval, "apitoken": ids.token, "approvalrule": ids.rule}[model]
    parts = {"object_id": key, "seq": "1", "sha256": ids.sha256, "call_id": ids.call, "run_id": ids.run}
    path = re.sub("<\\w+:(\\w+)>", lambda part: parts[part[1]], route)
    if "calls/" in path:
        is_wait = name in ("deliver", "stop_waiting")
        path = path.replace(ids.run, ids.waiter if is_wait else ids.orphan)
        path = path.replace(ids.call, ids.awaited) if is_wait else path
    if name in ("erase", "leave_out"):
        path = path.replace(ids.run, ids.ended).replace("rows/1/", "rows/2/")
    return f"/admin/agentruns/{model}/{path}"


def console_data(ids: Ids, card: str = "approval") -> dict[str, str]:
    """Return the fields that the forms of all doors have together, and one that asks to be shown all."""
    key, digest = getattr(ids, card), ids.digests[card]
    return {
        **{"digest": digest, "reason": "no", "text": "no", "hours": "4", "key": "k", "argument-note": "x"},
        **{"seq": "3", "verdict": "unknown", "evidence": "seen", "at": "2", "action": "approve_selected"},
        **{"agent": "spoken", "rating": "1", "kind": "tool", "name": "paint", "state": "off"},
        **{
            "confirmed": "1",
            f"digest-{key}": digest,
            "_selected_action": key,
            "revealed": "1",
            "max_steps": "99",
        },
    }


def rule_of(model: str, name: str, method: str, card: str) -> Rule:
    if name in ("add", "delete", ""):
        return Rule("Django's")
    if name == "start":  # an agent that anyone may start
        return Rule("list", "list" if method == "POST" else "nothing")
    if name == "switches":
        return Rule("switch", "switch") if method == "POST" else Rule("see switches")
    if name == "figures":  # of what they may see
        return Rule("list approvals")
    if name in ABOUT_A_LIST:
        return Rule(LISTS[model])
    if name == "changelist":
        return Rule(LISTS[model], "decide" if (model, method) == ("approval", "POST") else "nothing")
    if method == "POST" and name in CONSOLE_POSTS[model]:
        action = CONSOLE_POSTS[model][name]
        if card == "own" and action == "decide" and name != "deny":
            action = "nothing"  # the requester confirms it, as it is, through the API
        return Rule(action, action)
    if name == "erase":  # it says what else would go
        return Rule("operate")
    if method == "POST" and name == "change":
        return Rule("Django's")
    return Rule(SEES[model])


@pytest.mark.parametrize("who", sorted(SIGNED))
def test_commands_in_somebodys_name(who: str, ids: Ids, settings: Any) -> None:
    client_of(who, settings)
    for command, card in product(AS_USER, ("approval", "own")):
        arguments = [command, getattr(ids, card), "--user", who, *AS_USER[command]]
        before = rows()
        with transaction.atomic():
            if who in API[API_RULES[f"POST approvals/{{{card}}}/{command.removesuffix('_call')}"].act]:
                call_command(*arguments)
                assert rows() != before
                transaction.set_rollback(True)
                continue
            with pytest.raises((CommandError, SystemExit)) as refused:
                call_command(*arguments)
        assert rows() == before
        assert SECRET not in str(refused.value)
        assert PIN not in str(refused.value)
    assert Wary.strangers == []


def test_each_action_of_the_policy_is_asked_about() -> None:
    modules = Path(agentruns.__file__).parent.rglob("*.py")
    asking = re.compile(r'(?:\bmay|\b_?require|_change|ask\("can", False,) ?\(?[\w., ]*"(\w+)"')
    asked = {action for path in modules for action in asking.findall(path.read_text())}
    assert {*ACTIONS} - asked == set()


class Keeps(Wary):
    def can(self, user: Any, action: str, obj: Any) -> bool:
        """Let nobody take a run away."""
        return action != "export" and super().can(user, action, obj)


def test_an_export_asks_the_policy(ids: Ids, settings: Any) -> None:
    client = client_of("superuser", settings)
    for policy, status in ((Wary, 200), (Keeps, 403)):
        settings.AGENTRUNS_POLICY = f"{policy.__module__}.{policy.__name__}"
        response: Any = client.post(f"/admin/agentruns/run/{ids.ended}/export/")
        assert (response.status_code, b'"format"' in response.getvalue()) == (status, status == 200)


def test_doors_ask_the_policy_and_no_permission() -> None:
    for where in ("admin", "api", "management"):
        folder = Path(agentruns.__file__).parent / where
        lines = [line.strip() for path in folder.rglob("*.py") for line in path.read_text().splitlines()]
        assert not [line for line in lines if ".has_perm(" in line and "reveal" not in line.lower()]
