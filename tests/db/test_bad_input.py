"""Each kind of bad input gets its typed error, which says what to do next, and nothing is lost."""

from __future__ import annotations

import itertools
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from django.db import transaction
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, WrapValidator

import agentruns.exceptions as errors
from agentruns import (
    Agent,
    MemoryStore,
    ToolContext,
    approve,
    deny,
    get_run,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.store import DatabaseStore
from agentruns.models import Approval, Message, Run, Session
from agentruns.services.runs.control import cancel_run, pause_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from tests.db.dying import die_at
from tests.db.helpers import outcomes, payloads, run_turns, sound, the_run, user
from tests.effects import Effects
from tests.shop.agents import TOOLS, act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_without_an_agent_a_text_or_a_session() -> None:
    shop_agent("known")
    for agent, text, session, error, match in (
        ("unknown", "do it", "s1", errors.UnknownAgentError, "known"),
        ("known", " ", "s1", ValueError, "empty"),
        ("known", "do it", "", errors.NotDurableError, "session"),
        ("known", "do it", None, errors.NotDurableError, "session"),
    ):
        with pytest.raises(error, match=match):
            start_run(agent, text, session)
    assert Session.objects.count() == 0


def test_unknown_run() -> None:
    for run_id in ("018f0000-0000-7000-8000-000000000000", "nonsense", "", 7):
        for service in (get_run, resume_run):
            with pytest.raises(errors.DurableRunNotFoundError, match="There is no run"):
                service(run_id)
        with pytest.raises(errors.NotFoundError):
            approve(run_id, None)


def test_a_call_that_cannot_run_is_told_to_the_model() -> None:
    turns = [
        {"tools": [call("post", text=["not", "text"])]},
        {"tools": [call("post")]},
        {"tools": [call("post", text="x", colour="red")]},
        {"tools": [{"name": "post", "input": "not an object"}]},
        {"tools": [call("nothing_like_it")]},
        {"tools": [call("not a name at all! " * 9)]},
        {"content": [{"type": "tool_use", "name": "post"}], "stop_reason": "tool_use"},
        {"content": [{"type": "tool_use", "id": 7, "name": None, "input": 1}], "stop_reason": "tool_use"},
        {"tools": [call("broken")]},
    ]
    result = run_turns(*turns, {"tools": [call("lookup", number="A1")]})
    run = the_run(result)
    assert (run.status, outcomes(run)) == ("completed", ["error"] * len(turns) + ["ok"])
    assert all(told["is_error"] for told in payloads(run, "tool_result")[:-1])
    check_messages(result.messages)


def test_a_reply_cut_at_max_tokens_runs_nothing(effects: Effects) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "he"}}
    text = {"type": "text", "text": "half a sen"}
    result = run_turns(*({"content": [block], "stop_reason": "max_tokens"} for block in (use, text)))
    run = the_run(result)
    assert (run.status, effects.count(), outcomes(run)) == ("completed", 0, ["error"])
    assert (run.output, payloads(run, "run_completed")[0]["truncated"]) == ("half a sen", True)
    check_messages(result.messages)


@pytest.mark.parametrize("stop", ["refusal", "something_new"])
def test_other_stop_reasons_fail_the_run_and_the_session_goes_on(stop: str, effects: Effects) -> None:
    block = {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "x"}}
    run = the_run(run_turns({"content": [block], "stop_reason": stop}))
    assert (run.status, outcomes(run), effects.count()) == ("failed", ["error"], 0)
    again = run_agent(shop_agent("next"), "and now?", "s1", idempotency_key="k2")
    assert again.status == "completed"
    check_messages(again.messages)


def test_a_decision_counts_once_for_what_was_seen_with_the_permission_and_a_reason(effects: Effects) -> None:
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    turn = {"tools": [call("refund", cents=5000), call("refund", cents=6000)]}
    first, second = run_turns(turn).pending
    eve = user("eve", "view_approval")
    for decide in (approve, lambda pk, actor: deny(pk, actor, "no")):
        with pytest.raises(errors.PermissionDeniedError, match="decide_approval"):
            decide(first.pk, eve)
    with pytest.raises(errors.ApprovalStateError, match="needs a reason"):
        deny(first.pk, None, "  ")
    for digest in ("0" * 64, first.digest):
        with pytest.raises(errors.ApprovalStateError, match="Look at it again"):
            approve(second.pk, None, digest=digest)
    assert not Message.objects.filter(kind="approval_decided").exists()
    approve(first.pk, ann, digest=first.digest)
    with pytest.raises(errors.ApprovalStateError, match=r"closed \(approved\): decided by ann, 20"):
        deny(first.pk, bob, "no")
    sweep()
    with pytest.raises(errors.ApprovalStateError, match=r"closed \(approved, done\): decided by ann"):
        approve(first.pk, bob)
    second.refresh_from_db()
    assert (second.status, [line["cents"] for line in effects.lines()]) == ("pending", [5000])


def test_a_session_of_somebody_else_or_of_nobody() -> None:
    ann, eve = user("ann"), user("eve")
    agent = shop_agent("hers")
    for session, actor in (("s1", ann), ("s2", None)):
        start_run(agent, "do it", session, actor=actor)
        with pytest.raises(errors.SessionAccessDeniedError) as denied:
            start_run(agent, "do it", session, actor=eve)
        assert str(denied.value) == f"There is no session '{session}'."
    assert list(Run.objects.order_by("pk").values_list("session__owner", flat=True)) == [ann.pk, None]


def test_another_task_in_a_busy_session_or_under_a_key_that_was_used() -> None:
    agent = shop_agent("busy")
    run = start_run(agent, "do it", "s1", idempotency_key="k1")
    with pytest.raises(errors.SessionBusyError, match=str(run.pk)) as busy:
        start_run(agent, "do something else", "s1", idempotency_key="k2")
    assert busy.value.run_id == str(run.pk)
    with pytest.raises(errors.SessionBusyError, match="another idempotency key"):
        start_run(agent, "do it", "s1", idempotency_key="k2")
    assert start_run(agent, "do it", "s1") == run
    for session in ("s1", "s2"):
        with pytest.raises(errors.RunStateError, match=str(run.pk)):
            start_run(agent, "do something else", session, idempotency_key="k1")
    assert Session.objects.count() == 1


def test_a_call_inside_an_outer_transaction(effects: Effects) -> None:
    agent = shop_agent("inner", {"tools": [call("post", text="hi")]})
    with transaction.atomic(), pytest.raises(errors.NotDurableError, match=r"agent\.start\(\)"):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    assert (Run.objects.count(), effects.count()) == (0, 0)
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    for service in (lambda: resume_run(run.pk), sweep):
        with transaction.atomic(), pytest.raises(errors.NotDurableError):
            service()


class Forgetful(DatabaseStore):
    """A store of somebody else: what it says of itself counts, not its class."""

    durable = False

    def append(self, *arguments: object, **options: object) -> None:
        raise AssertionError("a store that forgets was written to")


@pytest.mark.parametrize("store", [MemoryStore(), Forgetful()])
def test_a_session_with_a_store_that_forgets(store: MemoryStore | Forgetful) -> None:
    model = ScriptedModel([lambda request: pytest.fail("the model was asked")])
    for tools, service in itertools.product((TOOLS, []), (run_agent, start_run)):
        agent = Agent("forgetful", instructions="Forget.", tools=tools, model=model)
        with pytest.raises(errors.MemoryStoreNotDurableError) as refused:
            service(agent, "do it", "s1", store=store)
        assert "Leave the store out to use the database" in str(refused.value)
        assert "leave the session out to run statelessly" in str(refused.value)
    assert Session.objects.count() == 0
    chat = Agent("chat", instructions="Chat.", model=ScriptedModel([{"text": "hello"}]))
    assert run_agent(chat, "hi", store=MemoryStore()).output == "hello", "without a session it is fine"


def test_there_is_no_switch_that_sounds_durable() -> None:
    agent = shop_agent("silent")
    for option in ("checkpoint_interval", "on_checkpoint", "checkpoint_every", "durable"):
        with pytest.raises(TypeError, match=option):
            Agent("sounds", instructions="x", model=ScriptedModel([]), **{option: True})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=option):
            run_agent(agent, "do it", "s1", **{option: True})  # type: ignore[arg-type]
    assert Run.objects.count() == 0


def test_a_run_that_has_ended_refuses_everything() -> None:
    run = the_run(run_turns())
    for service in (resume_run, cancel_run, pause_run):
        with pytest.raises(errors.RunStateError, match="has ended"):
            service(run.pk)
    assert the_run(run_turns()).pk == run.pk


# Arguments that would change on their way are refused; the others are what is shown, bound and run

COUNTER = itertools.count()
LOUDER = AfterValidator("{}!".format)
IN_CENTS = AfterValidator(lambda amount: amount * 100)


class Loud(BaseModel):
    text: Annotated[str, LOUDER]


# What a developer may write without noticing that reading the stored arguments changes them again.
UNSTABLE: dict[str, tuple[Any, Any]] = {
    "after": (Annotated[str, LOUDER], "a"),
    "before": (Annotated[str, BeforeValidator("{}!".format)], "a"),
    "wrap": (Annotated[str, WrapValidator(lambda text, inner: inner(text) + "!")], "a"),
    "serializer": (Annotated[str, PlainSerializer("{}!".format)], "a"),
    "in_a_list": (list[Annotated[int, IN_CENTS]], [3]),
    "in_a_model": (Loud, {"text": "a"}),
    "a_counter": (Annotated[int, AfterValidator(lambda number: number + next(COUNTER))], 1),
    "does_not_read_back": (Annotated[str, PlainSerializer(lambda text: {"text": text})], "a"),
}


def say_of(annotation: Any, **options: Any) -> Any:
    """Make a tool of one parameter that records what it was given."""

    def say(ctx: ToolContext, what: Any) -> str:
        """Say it."""
        return act("say", ctx, what=str(what))

    say.__annotations__["what"] = annotation
    return tool(**options)(say)


@pytest.mark.parametrize("asks", [False, True], ids=["runs", "asks"])
def test_a_coercer_that_is_no_fixed_point_is_refused(asks: bool, effects: Effects) -> None:
    tools = [say_of(kind, name=name, requires_approval=asks) for name, (kind, _) in UNSTABLE.items()]
    calls = [call(name, what=given) for name, (_, given) in UNSTABLE.items()]
    result = run_turns({"tools": calls}, tools=tools)
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"] * len(UNSTABLE), 0)
    assert not Message.objects.filter(kind__in=["tool_started", "approval_requested"]).exists()
    for told in payloads(run, "tool_result"):
        assert told["is_error"] and told["content"].startswith("Not executed: ") and "what" in told["content"]
    check_messages(result.messages)


def test_an_edit_that_would_change_again_is_refused_and_the_card_stays(effects: Effects) -> None:
    cut = Annotated[str, AfterValidator(lambda text: text[:-1] if len(text) > 3 else text)]
    say = say_of(cut, requires_approval=True)
    card = run_turns({"tools": [call("say", what="four")]}, tools=[say]).pending[0]
    assert card.arguments == {"what": "fou"}
    with pytest.raises(errors.ApprovalStateError, match="does not read back as itself"):
        approve(card.pk, None, digest=card.digest, arguments={"what": "hello"})
    assert not Message.objects.filter(kind="approval_decided").exists()
    card.refresh_from_db()
    assert (card.status, card.arguments) == ("pending", {"what": "fou"})
    approve(card.pk, None, digest=card.digest)
    assert sweep().completed == 1
    assert [line["what"] for line in effects.lines()] == ["fou"]


def capped(limit: list[int], how: str) -> Any:
    """Build the type of a number that is cut to a limit, or refused above it."""

    def cap(cents: int) -> int:
        if how == "refuses" and cents > limit[0]:
            raise ValueError(f"more than {limit[0]}")
        return min(cents, limit[0])

    return Annotated[int, AfterValidator(cap)]


@pytest.mark.parametrize("how", ["changes", "refuses"])
def test_a_coercer_that_changes_after_the_decision_runs_nothing(how: str, effects: Effects) -> None:
    """A deploy, or a limit kept elsewhere: it would not be what was approved, so people are asked again."""
    limit = [100]
    say = say_of(capped(limit, how), requires_approval=True)
    result = run_turns({"tools": [call("say", what=50), call("say", what=7)]}, tools=[say])
    for card in result.pending:
        approve(card.pk, None, digest=card.digest)
    limit[0] = 10
    assert (sweep().waiting, effects.count()) == (1, 0)
    (card,) = Approval.objects.pending()
    assert {"changes": "what: the tool now reads another", "refuses": "more than 10"}[how] in card.why
    with pytest.raises(ApprovalStateError, match="say cannot run this call as it is"):
        approve(card.pk, None, digest=card.digest)
    deny(card.pk, None, "too much")
    assert sweep().completed == 1
    run = the_run(result)
    assert (outcomes(run), [line["what"] for line in effects.lines()]) == (["denied", "ok"], ["7"])


@pytest.mark.parametrize("how", ["changes", "refuses"])
def test_a_coercer_that_changes_under_a_started_call_repeats_nothing(how: str, effects: Effects) -> None:
    """It may have happened with the old arguments: neither a result nor a second attempt is invented."""
    limit = [100]
    say = say_of(capped(limit, how), safe_to_retry=True)
    run = die_at("after_tool", shop_agent("capped", {"tools": [call("say", what=50)]}, tools=[say]))
    limit[0] = 10
    assert sweep().waiting == 1
    run.refresh_from_db()
    assert (run.status, effects.count(), outcomes(run)) == ("orphaned", 1, [])
    assert resume_run(run.pk).status == "completed"
    assert (effects.count(), outcomes(sound(run))) == (1, ["unknown"])


class Sealed(BaseModel):
    text: str
    token: UUID = Field(default_factory=uuid4, exclude=True)


def test_a_field_that_is_not_stored_is_refused_where_it_is_declared() -> None:
    """It would be hidden from the person who approves, and made anew for each attempt."""
    for annotation in (Sealed, list[Sealed], Annotated[UUID, Field(default_factory=uuid4, exclude=True)]):
        with pytest.raises(TypeError, match="exclude"):
            say_of(annotation)
