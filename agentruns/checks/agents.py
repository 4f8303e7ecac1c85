"""Checks of agents: their models, prices and MCP servers, and the people who may decide their approvals."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission, PermissionsMixin
from django.core.checks import CheckMessage, Error, Warning
from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from agentruns.agents.agent import registered, unpriced
from agentruns.agents.prices import mistakes
from agentruns.checks.base import check
from agentruns.conf import settings
from agentruns.providers.names import provider_of
from agentruns.tools.mcp import servers
from agentruns.tools.options import REQUESTER

DECIDE = "agentruns.decide_approval"
PLAIN_BACKENDS = {
    f"django.contrib.auth.backends.{name}"
    for name in ("ModelBackend", "AllowAllUsersModelBackend", "RemoteUserBackend")
}


@check()
def check_agents() -> Iterator[CheckMessage]:
    """Check that model objects have an identity, Anthropic models a Claude name, and cost budgets a price."""
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
        if why := unpriced(agent):
            hint = "Add the model to AGENTRUNS_PRICES; until then the agent's runs are paused."
            yield Warning(f"{agent!r}: {why}", hint=hint, id="agentruns.W003")


@check()
def check_mcp_servers() -> Iterator[CheckMessage]:
    """Check that each MCP server has a lock file, which contains the tools in `allow` and `read_only`."""
    for server in servers():
        hint = (
            f"Run `manage.py lock_mcp_tools {server.name}`, review the file and commit it, or correct "
            "allow= and read_only=. Until then agents lack these tools."
        )
        for problem in server.problems:
            yield Error(f"MCP server {server.name!r}: {problem}.", hint=hint, id="agentruns.E023")


@check(of=lambda: router.db_for_write(get_user_model()))  # a replica may be behind
def check_approvers(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Check that some active user may decide each tool's approvals, and that the groups it names exist.

    Leaves out calls that the requester confirms. Checks nothing with a user model or backend that stores
    permissions elsewhere, before the first migrate, or if the users' database is not being checked.
    """
    users, alias = get_user_model(), connection.alias
    gated: dict[str, set[str]] = {}  # tool names by their `approvers`, "" if any decider will do
    told: dict[str, set[str]] = {}  # tool names by their `escalate_to`
    for tool in (tool for agent in registered() for tool in agent.tools.values()):
        is_gated = tool.requires_approval is not False or tool.outward
        if tool.escalate_to:
            told.setdefault(tool.escalate_to, set()).add(tool.name)
        if is_gated and tool.approvers != REQUESTER:
            gated.setdefault(tool.approvers or "", set()).add(tool.name)
    # With another user model or backend, the tables do not tell who has a permission.
    fields = {field.name for field in users._meta.get_fields()}
    is_plain = issubclass(users, PermissionsMixin) and "is_active" in fields
    is_plain = is_plain and {*django_settings.AUTHENTICATION_BACKENDS} <= PLAIN_BACKENDS
    if not gated or not is_plain:
        return
    needed = {model._meta.db_table for model in (users, Group, Permission)}
    if not needed <= {*connection.introspection.table_names()}:
        return  # before the first migrate
    active = users._default_manager.using(alias).filter(is_active=True)
    has_users = active.exists()  # a new project has none yet
    permissions = Permission.objects.using(alias)
    # The names of groups, and of permissions with and without their app.
    known = {*Group.objects.using(alias).filter(name__in={*gated, *told}).values_list("name", flat=True)}
    named = permissions.filter(codename__in={name.rpartition(".")[2] for name in {*gated, *told}})
    for app, codename in named.values_list("content_type__app_label", "codename"):
        known |= {codename, f"{app}.{codename}"}

    def holding(name: str) -> Q:
        app, _, codename = name.rpartition(".")
        named = permissions.filter(codename=codename, **({"content_type__app_label": app} if app else {}))
        return Q(is_superuser=True) | Q(user_permissions__in=named) | Q(groups__permissions__in=named)

    for group in sorted({*told} - known):
        tools = ", ".join(sorted(told[group]))
        text = f"escalate_to={group!r} of {tools} names neither a permission nor a group."
        yield Warning(text, hint="Correct it, or make the group.", id="agentruns.W010")
    for approvers, names in sorted(gated.items()):
        tools, deciders = ", ".join(sorted(names)), active.filter(holding(DECIDE))
        if approvers:
            deciders = deciders.filter(holding(approvers) | Q(groups__name=approvers))
        if approvers and approvers not in known:
            text = f"approvers={approvers!r} of {tools} names neither a permission nor a group."
            hint = "Correct it, or make the group; until then only superusers may decide."
        elif has_users and not deciders.exists():
            who = f"may decide for {approvers!r}" if approvers else "has the permission to decide approvals"
            text = f"No active user {who}, so calls of {tools} wait for ever."
            hint = f"Give somebody the permission {DECIDE}" + (f" and {approvers}." if approvers else ".")
        else:
            continue
        yield Warning(text, hint=hint, id="agentruns.W010")
