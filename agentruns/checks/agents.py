"""Checks of agents: their models and prices, and people who may decide their approvals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission, PermissionsMixin
from django.core.checks import CheckMessage, Tags, Warning, register
from django.db import connections, router
from django.db.models import Q

from agentruns.agents.agent import registered
from agentruns.agents.prices import mistakes
from agentruns.checks.base import check
from agentruns.conf import settings
from agentruns.engine import budgets
from agentruns.tools.options import REQUESTER

DECIDE = "agentruns.decide_approval"
# With any other backend, rows do not say who has a permission.
PLAIN_BACKENDS = {
    f"django.contrib.auth.backends.{name}"
    for name in ("ModelBackend", "AllowAllUsersModelBackend", "RemoteUserBackend")
}


@check()
def check_agents() -> Iterator[CheckMessage]:
    """Check the models of the agents, and that models with a cost budget have a price."""
    for agent in registered():
        if isinstance(agent.model, str) and "claude" not in agent.model.lower():
            yield Warning(
                f"{agent!r}: {agent.model!r} is not the name of a Claude model.",
                hint="Correct the name, or silence this check if a gateway knows a model by it. For another "
                "provider, give the agent an object with propose().",
                id="agentruns.W011",
            )
    for agent in registered() if not mistakes(settings.PRICES) else ():
        if why := budgets.unpriced(agent):
            hint = "Add the model to AGENTRUNS_PRICES; until then the agent's runs are paused."
            yield Warning(f"{agent!r}: {why}", hint=hint, id="agentruns.W003")


@register(Tags.database)
def check_approvers(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> Sequence[CheckMessage]:
    """Check that somebody may decide the approvals of each gated tool."""
    users = get_user_model()
    alias = router.db_for_write(users)  # a replica may not know yet
    gated = _gated()
    if not gated or alias not in (databases or ()) or not _is_known_who_may(users):
        return []
    needed = {model._meta.db_table for model in (users, Group, Permission)}
    if not needed <= {*connections[alias].introspection.table_names()}:
        return []  # before the first migrate
    known = _Known(users, alias, {*gated, DECIDE})
    found: list[CheckMessage] = []
    for approvers, tools in sorted(gated.items()):
        if approvers and not known.permissions(approvers) and approvers not in known.groups:
            text = f"approvers={approvers!r} of {tools} names neither a permission nor a group."
            hint = "Correct it, or make the group; until then only superusers may decide."
        elif known.has_anybody and not known.has_decider(approvers):
            who = f"may decide for {approvers!r}" if approvers else "has the permission to decide approvals"
            text = f"No active user {who}, so calls of {tools} wait for ever."
            hint = f"Give somebody the permission {DECIDE}" + (f" and {approvers}." if approvers else ".")
        else:
            continue
        found.append(Warning(text, hint=hint, id="agentruns.W010"))
    return found


class _Known:
    """Permissions and groups that tools name, and their holders, read with a few queries for all tools."""

    def __init__(self, users: Any, alias: str, names: set[str]) -> None:
        codenames = {name.rpartition(".")[2] for name in names}
        rows = Permission.objects.using(alias).filter(codename__in=codenames)
        self._rows = list(rows.values_list("pk", "content_type__app_label", "codename"))
        self.groups = {*Group.objects.using(alias).filter(name__in=names).values_list("name", flat=True)}
        self._active = users._default_manager.using(alias).filter(is_active=True)
        self._has_superuser = self._active.filter(is_superuser=True).exists()

    @cached_property
    def has_anybody(self) -> bool:
        """True if there are users: a project that is being set up has none yet."""
        return bool(self._active.exists())

    def permissions(self, name: str) -> list[int]:
        """Return the keys of the permissions of a name, given with its app or without."""
        return [
            pk
            for pk, app, codename in self._rows
            if name == (f"{app}.{codename}" if "." in name else codename)
        ]

    def has_decider(self, approvers: str) -> bool:
        """Return whether an active user may decide for these approvers."""
        if self._has_superuser:
            return True
        deciders = self._active.filter(self._with(DECIDE))
        if approvers:
            deciders = deciders.filter(self._with(approvers) | Q(groups__name=approvers))
        return bool(deciders.exists())

    def _with(self, name: str) -> Q:
        keys = self.permissions(name)
        return Q(user_permissions__in=keys) | Q(groups__permissions__in=keys)


def _gated() -> dict[str, str]:
    """Return the names of gated tools by their approvers; "" stands for anybody who may decide."""
    gated: dict[str, set[str]] = {}
    for agent in registered():
        for tool in agent.tools.values():
            if tool.requires_approval is not False and tool.approvers != REQUESTER:
                gated.setdefault(tool.approvers or "", set()).add(tool.name)
    return {approvers: ", ".join(sorted(tools)) for approvers, tools in gated.items()}


def _is_known_who_may(users: Any) -> bool:
    fields = {field.name for field in users._meta.get_fields()}
    return (
        issubclass(users, PermissionsMixin)
        and "is_active" in fields
        and {*django_settings.AUTHENTICATION_BACKENDS} <= PLAIN_BACKENDS
    )
