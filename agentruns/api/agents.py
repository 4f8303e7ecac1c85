"""The endpoint of agents: those that this process knows, with their tools and which of these are gated."""

from __future__ import annotations

from django.http import HttpRequest

from agentruns.agents.agent import registered
from agentruns.api.auth import user_of
from agentruns.api.errors import documented
from agentruns.api.routing import router
from agentruns.api.schemas import AgentOut, AgentPage


@router.get("/agents", response=AgentPage, openapi_extra=documented(401, 403))
def list_agents(request: HttpRequest) -> AgentPage:
    """List the agents that runs can be started of, with their tools. Of one name the last is started."""
    user_of(request)
    return AgentPage(items=[AgentOut.of(agent) for agent in registered()], next=None)
