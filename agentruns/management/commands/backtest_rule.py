from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agentruns.management.base import COUNT, RULE, AgentRunsCommand, argument, rule_named
from agentruns.services.backtest import backtest


class Command(AgentRunsCommand):
    help = "Try a standing rule on the cards that people have decided. Changes nothing."

    arguments = (
        *RULE,
        argument("--limit", "Only the newest N cards.", type=COUNT, default=100_000, metavar="N"),
    )

    def act(self, *, name: str, scope: str, limit: int, **options: Any) -> None:
        rule = rule_named(name, scope)
        done = backtest(rule, most=limit, progress=lambda tried: self.tell(None, f"{tried} cards …"))
        counts = (
            f"{done.tried} cards, of which rule {rule} fits {done.fits}. People agreed in {done.agreed} and "
            f"disagreed in {done.disagreed}. A cap was full for {done.capped}. Erased: {done.left_out}."
        )
        others = [f"Approval {pk}: {verdict}." for pk, verdict in done.disagreements]
        self.tell({"rule": str(rule), **asdict(done)}, *others, counts)
