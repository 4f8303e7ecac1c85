"""Commands that act in the name of somebody who may: decisions, tokens and forks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from agentruns import run_agent, tool
from agentruns.models import ApiToken, Approval, Message, Run
from agentruns.services.api_tokens import authenticate
from agentruns.services.sweep import sweep
from tests.commands.running import Outcome, run
from tests.db.helpers import user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def approval(db: None) -> Approval:
    user("ann", "decide_approval")
    user("bob")
    return run_agent("calls-refund", "do it", "s1", idempotency_key="k1").pending[0]


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_a_decision(approval: Approval, effects: Effects, verb: str) -> None:
    words = (f"{verb}_call", str(approval.pk), "--user=ann", "--reason=so be it")
    about = {"id": str(approval.pk), "run": str(approval.run_id), "approvals": 0, "required": 1}
    if verb == "approve":
        outcome = run(*words, f"--digest={approval.digest}")
        assert (outcome.code, outcome.out) == (0, f"Approval {approval.pk} of refund is approved.\n")
    else:
        assert run(*words, "--json").lines == [{**about, "status": "denied"}]
    assert (sweep().completed, effects.count()) == (1, int(verb == "approve"))
    told = Message.objects.get(kind="approval_decided").payload
    assert (told["actor"]["name"], told["channel"], told["reason"]) == ("ann", "terminal", "so be it")
    assert ("so be it" in str(Message.objects.get(kind="tool_result").payload)) == (verb == "deny")


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        (("approve_call", "{id}", "--user=bob"), 1, "lacks the permission"),
        (("approve_call", "{id}", "--user=nobody"), 2, "nobody"),
        (("approve_call", "{id}", "--user=ann", "--digest=00"), 1, "were edited since you looked"),
        (("approve_call", "x", "--user=ann"), 1, "There is no approval x"),
        (("deny_call", "{id}", "--user=ann", "--reason= "), 1, "needs a reason"),
    ],
)
def test_refused(approval: Approval, command: tuple[str, ...], code: int, why: str) -> None:
    outcome = run(*(word.format(id=approval.pk) for word in command))
    assert (outcome.code, why in outcome.err) == (code, True), outcome.err
    assert Approval.objects.get().status == "pending"


def test_one_of_two_says_so() -> None:
    wire = tool(lambda: "wired", name="wire", requires_approval=True, approvals=2)
    user("ann", "decide_approval")
    agent = shop_agent("wires", {"tools": [call("wire")]}, tools=[wire])
    card = run_agent(agent, "do it", "s1", idempotency_key="k1").pending[0]
    outcome = run("approve_call", str(card.pk), "--user=ann")
    assert outcome.out == f"Approval {card.pk} of wire is pending (1 of 2 approvals).\n"
    assert run("approve_call", str(card.pk), "--user=ann").code == 1


@pytest.fixture
def ann(db: None) -> User:
    return user("ann")


def test_the_last_line_is_the_token_alone_with_what_was_asked_for(ann: User) -> None:
    outcome = run("create_api_token", "ann", "--scope", "runs:read", "approvals:decide", "--name=inbox")
    assert outcome.code == 0
    *lines, text = outcome.out.splitlines()
    token = authenticate(text)
    assert token is not None
    assert (token.owner, token.name, token.scopes) == (ann, "inbox", ["runs:read", "approvals:decide"])
    begun = f"Token {token.prefix} acts as ann: runs:read, approvals:decide; expires 20"
    assert lines[0].startswith(begun)
    assert lines[0].endswith(" UTC, or when ann's password changes.")
    assert not any(text in line for line in lines)
    both = ("--scope=runs:read", "--scope=runs:write")
    (made,) = run("create_api_token", "ann", *both, "--days=30", "--json").lines
    assert made["scopes"] == ["runs:read", "runs:write"]
    soon = authenticate(made["token"])
    assert soon is not None
    for each, days in ((token, 90), (soon, 30)):
        assert abs(each.expires_at - timezone.now() - timedelta(days=days)) < timedelta(minutes=10)
    assert "--scope" in run("create_api_token", "ann").err
    assert "runs:delete" in run("create_api_token", "ann", "--scope=runs:delete").err


@pytest.mark.parametrize(
    "command",
    [
        ("nobody", "--scope=runs:read"), ("ben", "--scope=runs:read"),
        ("ann", "--scope=runs:read", "--days=0"), ("ann", "--scope=runs:read", "--days=367"),
        ("ann", "--scope=runs:read", f"--name={'x' * 101}"),
    ],
)  # fmt: skip
def test_no_token(ann: User, command: tuple[str, ...]) -> None:
    user("ben", is_active=False)
    outcome = run("create_api_token", *command)
    assert (outcome.code, outcome.out) == (2, "")
    assert not ApiToken.objects.exists()


def hides(text: str) -> str:
    return "***"


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_token_in_another_database_and_redaction_leaves_it_as_it_is(ann: User, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = f"{__name__}.hides"
    assert run("create_api_token", "ann", "--scope=runs:read", "--database=other").code == 0
    assert ApiToken.objects.using("other").count() == 1
    assert not ApiToken.objects.exists()
    outcome = run("create_api_token", "ann", "--scope=runs:read")
    *told, token = outcome.out.splitlines()
    assert authenticate(token) is not None
    assert "ann" not in " ".join(told), "the token itself is random, and may have any letters"


def test_it_queues_a_fork_and_says_where(effects: Effects) -> None:
    agent = shop_agent("forked", {"tools": [call("post", text="hi")]})
    key = run_agent(agent, "say hi", "s1", idempotency_key="k1").run_id

    def fork(*more: str) -> Outcome:
        return run("fork_run", key, "--at", *more)

    assert (fork("6").code, "say in a text what to do" in fork("6").err) == (1, True)
    assert [fork("6", "--text", "").code, fork("99").code] == [2, 1]
    assert fork("6", "--text", "x", "--agent", "nobody").code == 1
    outcome, made = fork("6", "--text", "again", "--session", "mine"), Run.objects.get(origin=key)
    assert (outcome.code, str(made.pk) in outcome.out, made.session.key) == (0, True, "mine")
    (shown,) = fork("5", "--json").lines
    assert (shown["status"], shown["origin"], shown["origin_seq"]) == ("queued", key, 5)
    assert effects.count() == 1
    rows = run("show_run", str(made.pk)).out.partition("\n\n")[2].splitlines()
    assert ["(copied)" in row for row in rows] == [True] * 6 + [False] * 2
