"""Arguments that would change on their way are refused; the others are what is shown, bound and run."""

from __future__ import annotations

import itertools
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, WrapValidator

from agentruns import ToolContext, approve, resume_run, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.models import Message
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.dying import die_at
from tests.db.helpers import outcomes, payloads, run_turns, sound, the_run
from tests.effects import Effects
from tests.shop.agents import act as effect
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


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
    "cents": (Annotated[int, IN_CENTS], 3),
    "in_a_list": (list[Annotated[int, IN_CENTS]], [3]),
    "in_a_model": (Loud, {"text": "a"}),
    "a_counter": (Annotated[int, AfterValidator(lambda number: number + next(COUNTER))], 1),
    "does_not_read_back": (Annotated[str, PlainSerializer(lambda text: {"text": text})], "a"),
}


def say_of(annotation: Any, **options: Any) -> Any:
    """Make a tool of one parameter that records what it was given."""

    def say(ctx: ToolContext, what: Any) -> str:
        """Say it."""
        return effect("say", ctx, what=str(what))

    say.__annotations__["what"] = annotation
    return tool(**options)(say)


@pytest.mark.parametrize("asks", [False, True], ids=["runs", "asks"])
def test_a_coercer_that_is_no_fixed_point_is_refused(asks: bool, effects: Effects) -> None:
    tools = [say_of(kind, name=name, requires_approval=asks) for name, (kind, _) in UNSTABLE.items()]
    result = run_turns(
        {"tools": [call(name, what=given) for name, (_, given) in UNSTABLE.items()]}, tools=tools
    )
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
    with pytest.raises(ApprovalStateError, match="does not read back as itself"):
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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("changes", "Not executed: the arguments are not the ones that were recorded. Nothing happened."),
        ("refuses", "more than 10"),
    ],
)
def test_a_coercer_that_changes_after_the_decision_runs_nothing(
    how: str, said: str, effects: Effects
) -> None:
    """A deploy, or a limit kept elsewhere: it would not be what was approved, so it is not done."""
    limit = [100]
    say = say_of(capped(limit, how), requires_approval=True)
    result = run_turns({"tools": [call("say", what=50), call("say", what=7)]}, tools=[say])
    for card in result.pending:
        approve(card.pk, None, digest=card.digest)
    limit[0] = 10
    assert sweep().completed == 1
    run = the_run(result)
    assert (outcomes(run), [line["what"] for line in effects.lines()]) == (["error", "ok"], ["7"])
    assert said in payloads(run, "tool_result")[0]["content"]


@pytest.mark.parametrize("how", ["changes", "refuses"])
def test_a_coercer_that_changes_under_a_started_call_repeats_nothing(how: str, effects: Effects) -> None:
    """It may have happened with the old arguments: neither a result nor a second attempt is invented."""
    limit = [100]
    say = say_of(capped(limit, how), safe_to_retry=True)
    agent = shop_agent("capped", {"tools": [call("say", what=50)]}, tools=[say])
    run = die_at("after_tool", agent)
    limit[0] = 10
    assert sweep().waiting == 1
    run.refresh_from_db()
    assert (run.status, effects.count(), outcomes(run)) == ("orphaned", 1, [])
    assert resume_run(run.pk).status == "completed"
    assert (effects.count(), outcomes(sound(run))) == (1, ["unknown"])


class Sealed(BaseModel):
    text: str
    token: UUID = Field(default_factory=uuid4, exclude=True)


@pytest.mark.parametrize(
    "annotation",
    [Sealed, list[Sealed], Annotated[UUID, Field(default_factory=uuid4, exclude=True)]],
    ids=["model", "nested", "parameter"],
)
def test_a_field_that_is_not_stored_is_refused_where_it_is_declared(annotation: Any) -> None:
    """It would be hidden from the person who approves, and made anew for each attempt."""
    with pytest.raises(TypeError, match="exclude"):
        say_of(annotation)
