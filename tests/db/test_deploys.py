"""Runs that wait while their agent changes: an approved call runs as approved, or people are asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from pydantic import BaseModel, Field

from agentruns import (
    Agent,
    ToolContext,
    adopt_definition,
    approve,
    cancel_run,
    deny,
    pause_run,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.agents.agent import _registry
from agentruns.engine.leases import claim, drain
from agentruns.engine.worker import block
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.outbox import Notice
from agentruns.models import Approval, Control, Run, Session
from agentruns.services.runs.control import by_definition
from agentruns.services.runs.waiting import MOST, blocked
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch
from tests.db.crowds import ID, multiply, plan
from tests.db.helpers import kill, outcomes, payloads, sound, user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


class Order(BaseModel):
    number: str


class LaterOrder(Order):
    gift: bool = False


def pay(ctx: ToolContext, cents: int, order: Order) -> str:
    return act("pay", ctx, cents=cents)


def with_note(ctx: ToolContext, cents: int, order: Order, note: str = "by hand") -> str:
    return act("pay", ctx, cents=cents, note=note)


def with_two(
    ctx: ToolContext, cents: int, order: Order, limit: int | None = None, tags: tuple[str, ...] = ("new",)
) -> str:
    return act("pay", ctx, cents=cents, tags=tags)


def with_made(
    ctx: ToolContext, cents: int, order: Order, ref: str = Field(default_factory=lambda: str(uuid4()))
) -> str:
    return act("pay", ctx, cents=cents, ref=ref)


def with_required(ctx: ToolContext, cents: int, order: Order, note: str) -> str:
    return act("pay", ctx, cents=cents, note=note)


def with_nested(ctx: ToolContext, cents: int, order: LaterOrder) -> str:
    return act("pay", ctx, cents=cents)


def narrowed(ctx: ToolContext, cents: Annotated[int, Field(le=1000)], order: Order) -> str:
    return act("pay", ctx, cents=cents)


def read_otherwise(ctx: ToolContext, cents: float, order: Order) -> str:
    return act("pay", ctx, cents=cents)


def renamed(ctx: ToolContext, amount: int, order: Order) -> str:
    return act("pay", ctx, cents=amount)


def without(ctx: ToolContext, cents: int) -> str:
    return act("pay", ctx, cents=cents)


def tool_of(fn: Callable[..., str], **options: Any) -> Any:
    return tool(name="pay", **{"requires_approval": True, **options})(fn)


OTHER = tool(name="other")(without)
PAY = {"tools": [call("pay", cents=5000, order={"number": "A1"})]}
AS_APPROVED: dict[str, Any] = {
    "an optional parameter": tool_of(with_note),
    "two of them": tool_of(with_two),
    "nobody is asked any more": tool_of(pay, requires_approval=False),
    "others may approve, too": tool_of(pay, risk="low"),
    "it expires": tool_of(pay, expires_in=timedelta(hours=1), describe=lambda args: "A payment"),
    "it is asked about": tool_of(with_note, timeout=60, safe_to_retry=True),
}
# Each with what the card says, and what the person has to put in place of the arguments.
ASKED_AGAIN: dict[str, tuple[Any, str, dict[str, Any] | None]] = {
    "a default that is made anew": (tool_of(with_made), "ref", {"ref": "r1"}),
    "a required parameter": (tool_of(with_required), "note: Field required", {"note": "mine"}),
    "an optional part of a value": (tool_of(with_nested), "order.gift", {}),
    "a narrower type": (tool_of(narrowed), "cents: Input should be less", {"cents": 900}),
    "another type": (tool_of(read_otherwise), "cents: the tool now reads another value", {}),
    "a new name": (tool_of(renamed), "amount: Field required", {"cents": None, "amount": 5000}),
    "a parameter less": (tool_of(without), "order: Extra inputs", {"order": None}),
    "no such tool": (OTHER, "there is no tool 'pay' any more", None),
}
# The tool before and after, and the column of the card that says so.
STRICTER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more people": ({}, {"approvals": 2}, "required"),
    "others": ({}, {"approvers": "finance"}, "approvers"),
    "no longer the requester": ({"approvers": "requester"}, {}, "approvers"),
    "a password": ({}, {"risk": "high"}, "risk"),
}


@pytest.fixture
def registry() -> Iterator[None]:
    """An empty registry of agents, for deploys of one test."""
    with isolated_registry():
        yield


@pytest.fixture
def asked(registry: None) -> Callable[..., Approval]:
    """Start a run that waits for a payment's approval, and deploy another tool in place of its own."""

    def wait(**options: Any) -> Approval:
        agent = shop_agent("payer", PAY, tools=[tool_of(pay, **options)])
        owner = user("owner") if options.get("approvers") == "requester" else None
        return run_agent(agent, "pay it", "s1", actor=owner, idempotency_key="k").pending[0]

    return wait


def deploy(card: Approval, its: Any, first: str) -> None:
    """Register the payer with the tool `its`, in another version or not; adopt and approve, `first` first."""
    _registry.clear()
    shop_agent("payer", PAY, tools=[its], version="2" if first == "adopt" else "1")
    steps: list[Callable[[], Any]] = [
        lambda: adopt_definition(card.run_id),
        lambda: approve(card.pk, None, digest=card.digest),
    ]
    for step in steps if first == "adopt" else reversed(steps):
        step()


@pytest.mark.parametrize("first", ["adopt", "approve"])
@pytest.mark.parametrize("change", AS_APPROVED)
def test_an_approved_call_runs_as_approved_by_a_tool_that_takes_more(
    change: str, first: str, asked: Callable[..., Approval], effects: Effects
) -> None:
    card = asked()
    deploy(card, AS_APPROVED[change], first)
    assert sweep().completed == 1
    run, (line,) = sound(card.run), effects.lines()
    card.refresh_from_db()
    assert (outcomes(run), card.status, line["cents"]) == (["ok"], "consumed", 5000)
    assert line.get("note", "by hand") == "by hand"
    assert payloads(run, "tool_started")[0]["digest"] == card.digest


@pytest.mark.parametrize("change", ASKED_AGAIN)
def test_an_approved_call_that_fits_no_more_is_asked_about_again(
    change: str, asked: Callable[..., Approval], effects: Effects
) -> None:
    """The card says what has changed; approving it as it is is refused, edited it runs."""
    card, (its, says, edit) = asked(), ASKED_AGAIN[change]
    deploy(card, its, "approve")
    assert (sweep().waiting, effects.count()) == (1, 0)
    card.refresh_from_db()
    assert (card.status, sound(card.run).status) == ("pending", "awaiting-approval")
    assert card.why.startswith("pay has changed since this was approved: ") and says in card.why
    with pytest.raises(ApprovalStateError, match="pay cannot run this call as it is"):
        approve(card.pk, None, digest=card.digest)
    if edit is None:
        deny(card.pk, None, "the tool is gone", digest=card.digest)
    else:
        given = {name: each for name, each in {**card.arguments, **edit}.items() if each is not None}
        approve(card.pk, None, digest=card.digest, arguments=given)
    assert sweep().completed == 1
    assert outcomes(sound(card.run)) == (["denied"] if edit is None else ["ok"])
    assert effects.count() == (edit is not None)


@pytest.mark.parametrize("first", ["adopt", "approve"])
@pytest.mark.parametrize("change", STRICTER)
def test_an_approval_that_is_too_little_for_an_adopted_gate_is_asked_for_again_in_its_terms(
    change: str, first: str, asked: Callable[..., Approval], effects: Effects
) -> None:
    (before, options, column), staff = STRICTER[change], [user(name, "decide_approval") for name in "ab"]
    card = asked(**before)
    deploy(card, tool_of(pay, **options), first)
    assert (sweep().waiting, effects.count()) == (1, 0)
    run = sound(card.run)
    card.refresh_from_db()
    assert (run.status, card.status, card.approved_count) == ("awaiting-approval", "pending", 0)
    assert getattr(card, column) == (options.get(column) or options.get("approvals") or "")
    assert card.why.startswith("The gate of pay has changed since this was approved: ")
    for each in staff:
        each.groups.add(Group.objects.get_or_create(name="finance")[0])
    for each in staff[: card.required]:
        approve(card.pk, each, digest=card.digest)
    assert (sweep().completed, effects.count()) == (1, 1)
    assert len(payloads(sound(card.run), "approval_voided")) == 1


@pytest.mark.parametrize("options", [{}, {"requires_approval": lambda args, ctx: args["cents"] > 9}])
def test_a_call_that_waits_without_a_card_gets_one_if_the_adopted_tool_asks(
    options: dict[str, Any], registry: None, effects: Effects
) -> None:
    def serve(**options: Any) -> Agent:
        tools = [tool(name="first", requires_approval=True)(without), tool_of(pay, **options)]
        return shop_agent("payer", {"tools": [call("first", cents=1), *PAY["tools"]]}, tools=tools)

    (card,) = run_agent(serve(requires_approval=False), "pay it", "s1").pending
    _registry.clear()
    serve(**options)
    adopt_definition(card.run_id)
    approve(card.pk, None, digest=card.digest)
    assert (sweep().waiting, effects.count()) == (1, 1)
    new = Approval.objects.pending().get()
    assert (new.tool_name, new.why) == ("pay", "pay requires approval.")
    assert sound(new.run).status == "awaiting-approval"
    approve(new.pk, None, digest=new.digest)
    assert (sweep().completed, effects.count()) == (1, 2)
    assert outcomes(sound(new.run)) == ["ok", "ok"]


def test_people_who_are_asked_again_have_as_long_as_the_first_time(
    asked: Callable[..., Approval], effects: Effects
) -> None:
    """A deploy on the day after must not let the call expire before anybody has seen that it came back."""
    card = asked(expires_in=timedelta(hours=1), approvals=2)
    before = card.expires_at
    for name in ("ann", "ben"):
        approve(card.pk, user(name, "decide_approval"), digest=card.digest)
    shop_agent("payer", PAY, tools=[tool_of(narrowed)])
    adopt_definition(card.run_id)
    assert sweep().waiting == 1
    card.refresh_from_db()
    (row,) = payloads(sound(card.run), "approval_voided")
    assert (card.status, card.approved_count, len(row["voided"])) == ("pending", 0, 2)
    assert row["why"].count("has changed") == 1, "once, whoever approved"
    assert before is not None and card.expires_at is not None
    assert (card.expires_at > before, effects.count()) == (True, 0)


# --- what a deploy blocks is counted, and said once ---

heard: list[Notice] = []


def hear(notice: Notice) -> None:
    heard.append(notice)


def deployed(**options: Any) -> Agent:
    return shop_agent("payer", PAY, tools=[tool_of(pay)], **options)


def blocked_runs() -> set[UUID]:
    return {*Run.objects.filter(blocked()).values_list("pk", flat=True)}


def test_whatever_this_code_cannot_continue_is_blocked_until_it_can(registry: None) -> None:
    """Runs that wait for people, too; not what a worker of the old code drives, what ended, or a record."""
    old, keys = deployed(), ("queued", "later", "driven", "asks", "paused", "ends", "record")
    runs = {key: start_run(old, "pay it", key) for key in keys}
    run_id = {key: run.pk for key, run in runs.items()}
    Run.objects.filter(pk=run_id["later"]).update(not_before=Now() + timedelta(hours=1))
    resume_run(run_id["asks"])
    pause_run(run_id["paused"])
    cancel_run(run_id["ends"])
    assert claim("default", run_id["driven"]) is not None
    Session.objects.filter(key="record").update(imported_at=Now())
    assert blocked_runs() == set()
    rests = {run_id[key] for key in ("queued", "later", "asks", "paused")}
    new = deployed(max_steps=7)
    assert blocked_runs() == rests
    kill(runs["driven"])
    assert blocked_runs() == {*rests, run_id["driven"]}
    adopt_definition(run_id["asks"])
    assert blocked_runs() == {*rests, run_id["driven"]} - {run_id["asks"]}
    Run.objects.update(definition_id=new.definition_hash, version="1")
    Run.objects.filter(pk=run_id["queued"]).update(blocked_reason="another worker lacks it")
    assert blocked_runs() == {run_id["queued"]}, "found by a process with other code"


def test_one_notice_says_what_a_deploy_blocks(registry: None, settings: Any, mailoutbox: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.hear", "agentruns.contrib.mail.MailNotifier"]
    settings.AGENTRUNS_NOTIFY_EMAILS = ["lead@example.org"]
    heard.clear()
    runs = [start_run(deployed(), "pay it", f"s{number}") for number in range(4)]
    deployed(max_steps=7)
    switch("agent", "payer", "off", reason="it pays too much")
    sweep()
    assert not heard, "who switched the agent off knows"
    switch("agent", "payer", "on")
    Run.objects.update(blocked_reason="")
    drain("default")
    block(runs[0], "default")
    assert not heard, "the old code does not know what newer code has started"
    Control.objects.filter(name=Control.DRAINING).delete()
    assert at_once(*(partial(block, run, "default") for run in runs[:3])) == [1, 1, 1]
    for _each in range(3):
        Run.objects.filter(pk=runs[0].pk).update(blocked_reason="")
        assert sweep().blocked
    said = "4 unfinished with this definition. Run"
    assert [(one.type, one.title[: len(said)]) for one in heard] == [("run.blocked", said)]
    assert "max_steps differ" in heard[0].title and len(mailoutbox) == 1
    assert mailoutbox[0].subject.startswith("[agentruns] Runs are blocked: ")
    assert Control.objects.sweepers().count() == 1, "no worker has that name"
    deployed(max_steps=8)
    start_run(deployed(max_steps=9), "pay it", "other")
    deployed(max_steps=8)
    sweep()
    assert len(heard) == 2, "another definition is another notice"
    Control.objects.filter(name__startswith=Control.BLOCKED).update(seen_at=Now() - timedelta(days=2))
    Run.objects.filter(pk=runs[0].pk).update(blocked_reason="")
    sweep()
    assert len(heard) == 3, "if it blocks more runs on another day"


def test_counting_reads_no_run_that_has_ended(registry: None) -> None:
    run_agent(shop_agent("ends"), "do it", "s1")
    multiply(Run, 3000, id=ID[connection.vendor].format("n"))
    start_run(shop_agent("waits"), "do it", "s2")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with CaptureQueriesContext(connection) as captured:
        Run.objects.filter(blocked())[:MOST].count(), by_definition(Run.objects.all())
    for query in captured.captured_queries:
        used = plan(query["sql"])
        assert "agentruns_run_status (status=?)" in used or "agentruns_one_unfinished_run" in used, used
