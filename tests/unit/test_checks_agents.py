"""Checks of what agents declare; DEFAULT_MODEL."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User

from agentruns.agents.agent import Agent
from agentruns.checks.agents import check_agents, check_approvers
from agentruns.tools import Tool
from tests.db.helpers import user
from tests.registry import isolated_registry
from tests.shop.agents import refund as anybodys
from tests.shop.agents import shop_agent
from tests.unit.checks import ids, refund, wire

MODEL = "claude-sonnet-5-5"


def test_a_name_that_is_no_claude_model() -> None:
    for number, model in enumerate((MODEL, "eu.anthropic.claude-sonnet-5-5", "Claude-Haiku-5@20261021")):
        Agent(f"fine-{number}", instructions="", model=model)
    shop_agent("an object")
    assert check_agents(None) == []
    Agent("mistyped", instructions="", model="gpt-7")
    (found,) = check_agents(None)
    assert (found.id, "mistyped" in found.msg, "'gpt-7'" in found.msg) == ("agentruns.W011", True, True)


# DEFAULT_MODEL


def test_an_agent_without_a_model_has_the_default_one(settings: Any) -> None:
    settings.AGENTRUNS_DEFAULT_MODEL = MODEL
    agent = Agent("plain", instructions="Help.")
    named = Agent("plain", instructions="Help.", model=MODEL)
    assert (agent.model, agent.definition()["model"]) == (MODEL, MODEL)
    assert agent.definition_hash == named.definition_hash
    settings.AGENTRUNS_DEFAULT_MODEL = "claude-haiku-5"
    assert Agent("plain", instructions="Help.").definition_hash != agent.definition_hash
    assert (agent.model, Agent("own", instructions="", model=MODEL).model) == (MODEL, MODEL)


@pytest.mark.parametrize(
    ("default", "words"),
    [(None, "AGENTRUNS_DEFAULT_MODEL"), ("", "AGENTRUNS_DEFAULT_MODEL"), (5, "not 5")],
)
def test_an_agent_without_any_model_is_refused(default: Any, words: str, settings: Any) -> None:
    settings.AGENTRUNS_DEFAULT_MODEL = default
    with pytest.raises(TypeError, match=f"Agent 'plain'.* model.*{words}"):
        Agent("plain", instructions="Help.")


# Somebody to ask


def found(*tools: Tool) -> list[str]:
    """Return what is found where an agent has these tools."""
    with isolated_registry():
        Agent("gated", instructions="", model=MODEL, tools=tools)
        messages = check_approvers(None, databases=["default"])
    assert all(one.hint for one in messages)
    assert {*ids(messages)} <= {"agentruns.W010"}
    return [one.msg for one in messages]


@pytest.mark.django_db
def test_a_gate_that_nobody_may_open() -> None:
    assert found() == found(anybodys) == []  # nobody at all: the project is being set up
    user("cy")
    (nobody,) = found(anybodys)
    assert "refund" in nobody
    user("bo", "decide_approval")
    assert found(anybodys) == []
    (mistyped,) = found(wire, anybodys)
    assert "approvers='finance' of wire names neither a permission nor a group" in mistyped
    finance = Group.objects.create(name="finance")
    (empty,) = found(wire)
    assert "may decide for 'finance'" in empty
    finance.user_set.add(user("al"))  # who may not decide at all
    assert len(found(wire)) == 1
    finance.permissions.add(Permission.objects.get(codename="decide_approval"))
    assert found(wire) == []
    User.objects.filter(username="al").update(is_active=False)
    assert len(found(wire)) == 1
    User.objects.create_superuser("boss")
    assert found(wire, anybodys) == []


@pytest.mark.django_db
def test_a_gate_that_a_permission_opens(settings: Any) -> None:
    bo = user("bo", "decide_approval")
    assert len(found(refund)) == 1
    bo.user_permissions.add(Permission.objects.get(codename="change_user"))
    assert found(refund) == []
    bo.user_permissions.clear()
    assert len(found(refund)) == 1
    # With permissions from elsewhere nobody can tell.
    settings.AUTHENTICATION_BACKENDS = ["shop.auth.Directory", *settings.AUTHENTICATION_BACKENDS]
    assert found(refund) == []
