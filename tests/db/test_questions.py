"""A question to a person, more time for a person, and who may decide."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.utils import timezone

from agentruns import Agent, answer, approve, ask_human, deny, extend, question_to, run_agent, tool
from agentruns.agents.agent import definition_difference
from agentruns.exceptions import ApprovalStateError, NotDurableError, PermissionDeniedError
from agentruns.journal.deciders import why_not_decide
from agentruns.journal.verify import check, problems
from agentruns.models import Approval
from agentruns.services import permissions
from agentruns.services.data.repair import repair_session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.helpers import payloads, run_out, run_turns, user
from tests.effects import Effects
from tests.shop.agents import call, post, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def curious(*tools: Any, **asked: Any) -> Agent:
    """Build an agent that asks, and acts on the answer."""
    turns = [{"tools": [call("ask_human", **asked), call("post", text="after")]}, {"text": "done"}]
    return Agent("curious", instructions="Ask.", model=ScriptedModel(turns), tools=[*tools, post])


def asked(question_tool: Any = ask_human, **options: Any) -> Approval:
    """Run an agent until it has asked; return its card."""
    (card,) = run_agent(curious(question_tool, question="Which colour?", **options), "paint", "s1").pending
    return card


def test_an_answer_is_the_result_word_for_word_and_later_calls_waited_for_it(effects: Effects) -> None:
    approval = asked()
    assert (approval.title, approval.tool_name, effects.count()) == ("Which colour?", "ask_human", 0)
    answer(approval.pk, user("ann", "decide_approval"), "green, she said")
    assert sweep().completed == 1
    first, second = payloads(approval.run, "tool_result")
    assert (first["content"], first["outcome"], first["actor"]["name"]) == (
        "green, she said", "answered", "ann",
    )  # fmt: skip
    assert second["outcome"] == "ok"
    assert payloads(approval.run, "tool_started")[0]["declares"] == "nothing", "the question never started"


def test_a_question_is_never_executed() -> None:
    approval = asked()
    for changed in ({}, {"arguments": {"question": "Which size?", "choices": None}}):
        with pytest.raises(ApprovalStateError, match=r"there is nothing to execute\. Answer it"):
            approve(approval.pk, None, digest=approval.digest, **changed)
    deny(approval.pk, None, "find out yourself")
    assert (sweep().completed, payloads(approval.run, "tool_result")[0]["outcome"]) == (1, "denied")
    with pytest.raises(NotDurableError):  # a stateless run cannot ask
        run_agent(curious(ask_human, question="Which colour?"), "paint")


@pytest.mark.parametrize("free_text", [None, False, True])
def test_a_text_outside_the_choices_is_refused_unless_the_question_allows_it(free_text: bool | None) -> None:
    approval = asked(choices=["red", "blue"], **({} if free_text is None else {"free_text": free_text}))
    for text in () if free_text else ("green", "Red", "red ", "red, blue"):
        with pytest.raises(ApprovalStateError, match="only one of its choices: 'red', 'blue'"):
            answer(approval.pk, None, text, digest=approval.digest)
    assert payloads(approval.run, "approval_decided") == []
    answer(approval.pk, None, "green" if free_text else "blue", digest=approval.digest)
    sweep()
    assert payloads(approval.run, "tool_result")[0]["content"] == ("green" if free_text else "blue")


def test_questions_for_some_people_under_names_of_their_own() -> None:
    ask_legal = question_to("lawyers", name="ask_human", expires_in=timedelta(hours=1), risk="high")
    approval = asked(ask_legal)
    assert (approval.approvers, approval.risk, approval.expires_at is None) == ("lawyers", "high", False)
    with pytest.raises(PermissionDeniedError, match="decided by lawyers"):
        answer(approval.pk, user("ann", "decide_approval"), "yes")
    with pytest.raises(TypeError, match="cannot be named"):
        question_to(name="ask a lawyer")
    assert "only_answers" not in refund.policy()  # a definition says that a tool only asks
    other = tool(name="ask_human", requires_approval=True, safe_to_retry=True)(ask_human.fn)
    parts = definition_difference(*(curious(one, question="?").definition() for one in (ask_human, other)))
    assert any("ask_human" in part for part in parts)


def timed() -> Approval:
    slow = tool(name="slow", requires_approval=True, expires_in=timedelta(hours=1))(post.fn)
    agent = shop_agent("slow", {"tools": [call("slow", text="hi")]}, tools=[slow])
    return run_agent(agent, "go", "slow").pending[0]


def test_time_is_given_by_who_may_decide_and_not_after_it_is_over() -> None:
    approval, ann = timed(), user("ann", "decide_approval")
    later = extend(approval.pk, ann, timedelta(hours=2), digest=approval.digest, reason="Bob is ill")
    assert approval.expires_at is not None
    assert (later.status, later.expires_at) == ("pending", approval.expires_at + timedelta(hours=2))
    (row,) = payloads(approval.run, "approval_extended")
    assert (row["actor"]["name"], row["reason"]) == ("ann", "Bob is ill")
    assert problems(approval.run.session_id) == []
    with pytest.raises(PermissionDeniedError):
        extend(approval.pk, user("bob"), timedelta(hours=1))
    for much in (timedelta(), timedelta(hours=-1), timedelta(days=400)):
        with pytest.raises(ApprovalStateError, match="must be positive and at most"):
            extend(approval.pk, None, much)
    with pytest.raises(ApprovalStateError, match="were edited since you looked"):
        extend(approval.pk, None, timedelta(hours=1), digest="nonsense")
    run_out(approval)
    with pytest.raises(ApprovalStateError, match="expired at"):
        extend(approval.pk, None, timedelta(hours=1))
    endless = run_agent(shop_agent("e", {"tools": [call("refund", cents=5000)]}), "go", "e").pending[0]
    with pytest.raises(ApprovalStateError, match="never expires"):
        extend(endless.pk, None, timedelta(hours=1))


def test_a_card_whose_authority_or_time_was_changed_behind_the_journal_is_found_and_mended() -> None:
    approval, later = timed(), timezone.now() + timedelta(days=30)
    changes = {"approvers": "everybody", "required": 7, "risk": "low"}
    for column, value in (("expires_at", later), ("expires_at", None), *changes.items()):
        Approval.objects.update(**{column: value})
        (problem,) = check(approval.run.session_id)
        assert (problem.column, problem.approval) == (column, approval.pk)
        repair_session("default", approval.run.session_id)
        assert getattr(Approval.objects.get(), column) == getattr(approval, column)
        assert problems(approval.run.session_id) == []


def card(approvers: str = "") -> Approval:
    run_turns({"tools": [call("refund", cents=5000)]})
    Approval.objects.update(approvers=approvers)
    return Approval.objects.select_related("run").get()


def test_a_group_may_have_a_dot_in_its_name() -> None:
    """A user model without groups and permissions decides what names nobody."""
    named, ann = card("Acme Inc. support"), user("ann", "decide_approval")
    bare = SimpleNamespace(
        pk=7,
        is_active=True,
        is_authenticated=True,
        get_username=lambda: "bare",
        has_perm="agentruns.decide_approval".__eq__,
    )
    for one in (ann, bare):
        assert "is not among them" in why_not_decide(one, named)
        assert [*permissions.decidable(one, [named])] == []
    ann.groups.add(Group.objects.create(name="Acme Inc. support"))
    ann = type(ann).objects.get(pk=ann.pk)
    for one, approvers in ((ann, "Acme Inc. support"), (bare, "")):
        Approval.objects.update(approvers=approvers)
        named.approvers = approvers
        assert (why_not_decide(one, named), [*permissions.decidable(one, [named])]) == ("", [named])
        assert [*permissions.open_to(one, Approval.objects.all())] == [named]
