"""The two forms of "may decide", one approval in Python and very many in a query, agree on random cases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from hypothesis import given, strategies as st

from agentruns import Policy, approve, run_agent, tool
from agentruns.journal.deciders import why_not_decide
from agentruns.models import Approval, Run
from agentruns.services import permissions
from tests.properties.faults import tried_on
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db

DECIDE = "decide_approval"
GROUPS = ("treasurers", "Acme Inc. support", DECIDE)
HELD = (DECIDE, "view_run", "add_user")
APPROVERS = ("", *GROUPS[:2], "view_run", "agentruns.view_run", "auth.add_user", "nobody")

people = st.fixed_dictionaries(
    {
        "is_active": st.sampled_from([True, True, True, False]),
        "is_superuser": st.sampled_from([False, False, False, True]),
        "groups": st.sets(st.sampled_from(GROUPS)),
        "held": st.sets(st.sampled_from(HELD)),
    }
)
cards = st.fixed_dictionaries(
    {
        "approvers": st.sampled_from(APPROVERS), "expires_in": st.sampled_from([None, -60, 3600]),
        "owner": st.sampled_from([None, 0, 1]), "given_by": st.sampled_from([None, None, 0, 1]),
    }
)  # fmt: skip


@tool(requires_approval=True, approvals=2)
def transfer(cents: int) -> str:
    """Transfer money."""
    return "done"


class Even(Policy):
    """A project's own rule, in both forms."""

    def decidable(self, user: Any, approvals: Any) -> Any:
        return approvals.filter(call_id__regex="[02468ace]$")

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        return int(approval.call_id[-1], 16) % 2 == 0


def make_user(number: int, person: dict[str, Any]) -> User:
    flags = {name: person[name] for name in ("is_active", "is_superuser")}
    user = User.objects.create_user(f"user-{number}", **flags)
    user.groups.set([Group.objects.get_or_create(name=name)[0] for name in person["groups"]])
    user.user_permissions.set(Permission.objects.filter(codename__in=person["held"]))
    return User.objects.get(pk=user.pk)


@pytest.fixture
def waiting() -> list[Approval]:
    """Four approvals that wait."""
    shop_agent("payer", {"tools": [call("transfer", cents=5)]}, tools=[transfer])
    return [run_agent("payer", "pay", f"s{number}").pending[0] for number in range(4)]


def change(approval: Approval, card: dict[str, Any], users: list[User]) -> None:
    if card["given_by"] is not None:
        approve(approval.pk, users[2 + card["given_by"]], digest=approval.digest)
    owner = None if card["owner"] is None else users[card["owner"]].pk
    Run.objects.filter(pk=approval.run_id).update(owner_id=owner, requesters=f" {owner} " if owner else "")
    seconds = card["expires_in"]
    expires_at = None if seconds is None else timezone.now() + timedelta(seconds=seconds)
    Approval.objects.filter(pk=approval.pk).update(approvers=card["approvers"], expires_at=expires_at)


@given(
    st.lists(people, min_size=2, max_size=2),
    st.lists(cards, min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from(["agentruns.Policy", f"{__name__}.Even"]),
)
@tried_on(40, brief=20, long=1000)
def test_one_by_one_and_by_query(
    waiting: list[Approval], persons: list[Any], asked: list[Any], requester_may: bool, rule: str
) -> None:
    with (
        override_settings(AGENTRUNS_REQUESTER_MAY_APPROVE=requester_may, AGENTRUNS_POLICY=rule),
        transaction.atomic(),
    ):
        users = [make_user(number, person) for number, person in enumerate(persons)]
        users += [User.objects.create_superuser(f"boss-{number}") for number in range(2)]
        with override_settings(AGENTRUNS_POLICY="agentruns.Policy", AGENTRUNS_REQUESTER_MAY_APPROVE=True):
            for approval, card in zip(waiting, asked, strict=True):
                change(approval, card, users)
        pending = Approval.objects.pending().select_related("run").order_by("pk")
        for user in users:
            one_by_one = [approval.pk for approval in permissions.decidable(user, list(pending))]
            by_query = permissions.decidable_by(user, pending).values_list("pk", flat=True)
            assert one_by_one == list(by_query), user
            for approval in pending:
                if approval.pk in one_by_one:
                    assert why_not_decide(user, approval) == ""
        transaction.set_rollback(True)
