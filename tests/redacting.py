"""A project that redacts card numbers and keys, and a story in which everybody wrote one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from agentruns import Agent, approve, deny, run_agent, start_run, tool
from agentruns.agents.agent import get_agent
from agentruns.models import Approval, Run
from agentruns.providers.base import ModelReply, ModelRequest, ProviderError
from agentruns.testing import ScriptedModel
from tests.shop.agents import call

CARD = "4242420123456789"
KEY = "sk-live_9KmWz3vQxT7rYbNp"
PIN = "pin-777001"  # sensitive, so masked outside the card, and not redacted
HIDE, FAIL, NOT_TEXT = "tests.redacting.hide", "tests.redacting.fail", "tests.redacting.not_text"
SHORTEST = 8  # characters of a secret that count as a part of it

seen: list[Any] = []  # what handlers were given


def hide(text: str) -> str:
    return re.sub(r"sk-\w+", "[key]", re.sub(r"\b\d{16}\b", "[card]", text))


def fail(text: str) -> str:
    raise ValueError(f"cannot redact {text}")


def not_text(text: str) -> Any:
    return [text]


def leaks(text: str) -> list[str]:
    """Find what of the secrets is in a text, also a part of one."""
    parts = [one[at : at + SHORTEST] for one in (CARD, KEY) for at in range(len(one) - SHORTEST + 1)]
    return [text[max(0, text.index(part) - 40) :][:100] for part in parts if part in text]


@tool(requires_approval=True, describe=lambda args: f"Charge {args['card']}", sensitive=["pin"])
def charge(card: str, number: int, note: dict[str, list[str]], pin: str = "") -> dict[str, Any]:
    """Charge a card."""
    seen.append((card, number, note))
    return {"charged": card, card: [KEY], "number": number}


@tool
def explode(key: str) -> str:
    """Fail with the key."""
    seen.append(key)
    raise ValueError(f"no access with {key}")


class Reckless(ScriptedModel):
    """Keeps what it was asked."""

    def propose(self, request: ModelRequest) -> ModelReply:
        seen.append(request)
        return super().propose(request)


def refuses(request: ModelRequest) -> dict[str, Any]:
    raise ProviderError(f"{KEY} is not valid for {CARD}", type="authentication_error")


def paid(pin: str) -> dict[str, object]:
    """A call of `charge` with a secret in every argument; written out over lines in one of them."""
    return call("charge", card=CARD, number=int(CARD), note={KEY: [f"line\n{CARD}\nline"]}, pin=pin)


def keeper() -> Agent:
    """An agent whose every turn holds a secret."""
    turns = [
        {"text": f"I use {KEY}", "tools": [call("explode", key=KEY)]},
        {"text": f"{'x' * 3995} {CARD} tail", "tools": [paid(PIN)]},
        {"tools": [paid(f"{PIN}2")]},
        {"text": f"done with {CARD}\nand {KEY}"},
    ]
    return Agent("keeper", instructions="Keep.", tools=[charge, explode], model=Reckless(turns))


@dataclass
class Story:
    """A run that completed, one that failed, one that waits and one that is queued."""

    done: Run
    failed: Run
    waiting: Approval
    queued: Run
    runs: list[Run] = field(default_factory=list)


def story(actor: Any = None) -> Story:
    """Tell it, with a denial and an approval on the way."""
    seen.clear()
    agent = keeper()
    bad = Agent("refused", instructions="Fail.", model=ScriptedModel([refuses]))
    done = run_agent(agent, f"charge {CARD}", f"talk {CARD}", actor=actor, idempotency_key=f"once {KEY}")
    approve(done.pending[0].pk, None, reason=f"fine, {KEY}")
    done = _drive(done.run_id)
    deny(done.approvals.get(status="pending").pk, None, f"{KEY} leaked")
    done = _drive(done.pk)
    failed = run_agent(bad, f"use {KEY}", f"fails {CARD}", actor=actor, idempotency_key=f"twice {KEY}")
    waits = run_agent(agent, f"again {CARD}", f"waits {CARD}", actor=actor, idempotency_key=f"thrice {KEY}")
    queued = start_run(agent, f"later {CARD}", f"queued {CARD}", actor=actor)
    assert (done.status, failed.status, waits.status) == ("completed", "failed", "awaiting-approval")
    told = Story(done, Run.objects.get(pk=failed.run_id), waits.pending[0], queued)
    told.runs = list(Run.objects.order_by("created_at"))
    return told


def _drive(run_id: Any) -> Run:
    from agentruns.services.sweep import sweep

    assert get_agent("keeper")
    sweep(run_id=run_id)
    return Run.objects.get(pk=run_id)
