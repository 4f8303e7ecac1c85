"""The endpoint that lists the agents which the user may start, with their tools and gates."""

from __future__ import annotations

from django.http import HttpRequest

from agentruns.api.auth import user_of
from agentruns.api.routing import router
from agentruns.api.schemas import AgentOut, AgentPage
from agentruns.services.runs.starting import agents_of


@router.get("/agents", response=AgentPage)
def list_agents(request: HttpRequest) -> AgentPage:
    """List the agents that you may start, with their tools. A new run uses an agent's highest version."""
    return AgentPage(items=[AgentOut.of(agent) for agent in agents_of(user_of(request))], next=None)
