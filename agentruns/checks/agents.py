"""Checks of agents: their models and prices, and people who may decide their approvals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission, PermissionsMixin
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router
from django.db.models import Q, QuerySet

from agentruns.agents.agent import registered
from agentruns.agents.prices import mistakes
from agentruns.checks.base import check
from agentruns.conf import settings
from agentruns.engine import budgets
from agentruns.providers.names import provider_of
from agentruns.tools.mcp import servers
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
    for agent, model in [(each, model) for each in registered() for model in each.models]:
        if not isinstance(model, str):
            if not getattr(model, "identity", None):
                hint = "Give its class an `identity` of provider and model, so that a swap is noticed."
                text = f"{agent!r}: its model, a {type(model).__name__}, has no identity."
                yield Error(text, hint=hint, id="agentruns.E021")
        elif provider_of(model) == "anthropic" and "claude" not in model.lower():
            hint = "Correct it, name a provider as in 'openai:gpt-5.4', or silence this for a gateway."
            text = f"{agent!r}: {model!r} is not the name of a Claude model."
            yield Warning(text, hint=hint, id="agentruns.W011")
    for agent in registered() if not mistakes(settings.PRICES) else ():
        if why := budgets.unpriced(agent):
            hint = "Add the model to AGENTRUNS_PRICES; until then the agent's runs are paused."
            yield Warning(f"{agent!r}: {why}", hint=hint, id="agentruns.W003")


@check()
def check_mcp_servers() -> Iterator[CheckMessage]:
    """Check that each MCP server has a lock file with the tools that are taken from it."""
    for server in servers():
        hint = (
            f"Run `manage.py lock_mcp_tools {server.name}`, review the file and commit it, or correct "
            "allow= and read_only=. Until then agents lack these tools."
        )
        for problem in server.problems:
            yield Error(f"MCP server {server.name!r}: {problem}.", hint=hint, id="agentruns.E023")


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
    active = users._default_manager.using(alias).filter(is_active=True)
    has_users = active.exists()  # a project that is being set up has none yet
    known = _known({*gated}, alias)
    found: list[CheckMessage] = []
    for approvers, tools in sorted(gated.items()):
        if approvers and approvers not in known:
            text = f"approvers={approvers!r} of {tools} names neither a permission nor a group."
            hint = "Correct it, or make the group; until then only superusers may decide."
        elif has_users and not _deciders(active, approvers, alias).exists():
            who = f"may decide for {approvers!r}" if approvers else "has the permission to decide approvals"
            text = f"No active user {who}, so calls of {tools} wait for ever."
            hint = f"Give somebody the permission {DECIDE}" + (f" and {approvers}." if approvers else ".")
        else:
            continue
        found.append(Warning(text, hint=hint, id="agentruns.W010"))
    return found


def _known(names: set[str], alias: str) -> set[str]:
    """Return the names of groups among these, and those of permissions, with their app and without."""
    groups = Group.objects.using(alias).filter(name__in=names).values_list("name", flat=True)
    named = Permission.objects.using(alias).filter(codename__in={name.rpartition(".")[2] for name in names})
    found = set(groups)
    for app, codename in named.values_list("content_type__app_label", "codename"):
        found |= {codename, f"{app}.{codename}"}
    return found


def _permissions(name: str, alias: str) -> QuerySet[Permission]:
    """Return the permissions of a name, given with its app or without."""
    app, _, codename = name.rpartition(".")
    found = Permission.objects.using(alias).filter(codename=codename)
    return found.filter(content_type__app_label=app) if app else found


def _deciders(users: QuerySet[Any], approvers: str, alias: str) -> QuerySet[Any]:
    """Return those of some users who may decide for these approvers."""
    found = users.filter(_holding(DECIDE, alias))
    return found.filter(_holding(approvers, alias) | Q(groups__name=approvers)) if approvers else found


def _holding(name: str, alias: str) -> Q:
    named = _permissions(name, alias)
    return Q(is_superuser=True) | Q(user_permissions__in=named) | Q(groups__permissions__in=named)


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
