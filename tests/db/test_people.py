"""Who may decide and whose runs are listed, also for user models and groups of an unusual kind."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser, Group, Permission, User

from agentruns import list_runs, start_run
from agentruns.journal.deciders import why_not_decide
from agentruns.models import Approval
from agentruns.services import permissions
from tests.db.helpers import run_turns
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


class Bare:
    """A user of a model without PermissionsMixin."""

    pk = 7
    is_active = is_authenticated = True

    def get_username(self) -> str:
        return "bare"

    def has_perm(self, name: str) -> bool:
        return name == "agentruns.decide_approval"


def card(approvers: str = "") -> Approval:
    run_turns({"tools": [call("refund", cents=5000)]})
    Approval.objects.update(approvers=approvers)
    return Approval.objects.select_related("run").get()


def test_a_user_model_without_groups_and_permissions_decides_what_names_nobody() -> None:
    asked, bare = card(), Bare()
    assert [*permissions.decidable(bare, [asked])] == [asked]
    assert [*permissions.open_to(bare, Approval.objects.all())] == [asked]
    asked.approvers = "treasurers"
    assert "is not among them" in why_not_decide(bare, asked)
    assert [*permissions.decidable(bare, [asked])] == []


def test_a_group_may_have_a_dot_in_its_name() -> None:
    asked, ann = card("Acme Inc. support"), User.objects.create_user("ann")
    ann.user_permissions.add(Permission.objects.get(codename="decide_approval"))
    assert "is not among them" in why_not_decide(ann, asked)
    ann.groups.add(Group.objects.create(name="Acme Inc. support"))
    ann = User.objects.get(pk=ann.pk)
    assert why_not_decide(ann, asked) == ""
    assert [*permissions.decidable(ann, [asked])] == [asked]
    assert [*permissions.open_to(ann, Approval.objects.all())] == [asked]


def test_nobodys_runs_are_not_a_visitors() -> None:
    start_run(shop_agent("good"), "do it", "a")
    assert not list_runs(owner=AnonymousUser()).exists()
    assert list_runs().count() == 1


def test_a_session_is_named_by_a_text() -> None:
    with pytest.raises(TypeError, match="The session must be a text, not 42"):
        start_run(shop_agent("good"), "do it", 42)  # type: ignore[arg-type]
