"""What is explored: small replies with every kind of tool, and how often what is rare happens."""

from __future__ import annotations

from tests.model.runs import Tool
from tests.model.world import Left, Scenario

NOTHING, RETRY, RECONCILE = Tool(), Tool("retry"), Tool("reconcile")
UNSURE, TRANSACTIONAL = Tool("reconcile", sure=False), Tool("transactional")
AWAITS, AWAITS_OTHER = Tool(awaits="call"), Tool(awaits="other")
GATED, SEARCH = Tool(gated=True), Tool("retry", parallel=True)
# How often what is rare may happen: FEW in a reply with two calls, ONCE in one with one call, TWICE in
# `make test-full`, which has ONCE in a reply with two calls. An event by another key has more than two
# million states with TWICE, and 164,546 with ONCE and two deliveries.
FEW = Left(crashes=1, freezes=1, verdicts=1, resumes=0, cancels=1, deliveries=1)
ONCE = Left(crashes=1, freezes=1, verdicts=1, resumes=1, cancels=2, deliveries=1)
TWICE = Left(crashes=2, freezes=2, verdicts=2, resumes=1, cancels=2, deliveries=2)

SCENARIOS = {
    "a tool that declares nothing": (NOTHING,),
    "a tool that is safe to retry": (RETRY,),
    "a tool with reconcile": (RECONCILE,),
    "a tool whose reconcile does not know": (UNSURE,),
    "a transactional tool": (TRANSACTIONAL,),
    "a tool that needs approval": (GATED,),
    "two calls": (NOTHING, NOTHING),
    "a call that needs approval, then a call": (GATED, RECONCILE),
    "a call that needs approval, then a parallel call": (GATED, SEARCH),
    "a call, then a call that needs approval": (NOTHING, GATED),
    "a call that waits for an event": (AWAITS,),
    "a call that waits for an event by another key": (AWAITS_OTHER,),
    "a call that waits for an event, then a call": (AWAITS, NOTHING),
    "a call that waits for an event, then a parallel call": (AWAITS, SEARCH),
}


def scenario(name: str, *, long: bool = False) -> Scenario:
    """Build the scenario of a name; a `long` one has more states."""
    tools = SCENARIOS[name]
    left = (TWICE if long else ONCE) if len(tools) == 1 else (ONCE if long else FEW)
    if not any(tool.awaits for tool in tools):
        left = left._replace(deliveries=0)
    elif len(tools) == 1 and not (long and tools == (AWAITS,)):
        left = (ONCE if long else FEW)._replace(deliveries=2)
    return Scenario(name, tools, left)
