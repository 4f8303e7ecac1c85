from __future__ import annotations

from typing import Any

from agentruns.journal.events import Program
from agentruns.management.base import RULE, AgentRunsCommand, argument, rule_named, user_named
from agentruns.services.rules import stop_rule


class Command(AgentRunsCommand):
    help = "Stop a standing rule at once: a call that it approved, and that has not started, asks a person."

    arguments = (
        *RULE,
        argument("--user", "The user who stops it (the program).", metavar="NAME"),
        argument("--reason", "Shown with the rule.", default="", metavar="TEXT"),
    )

    def act(self, *, name: str, scope: str, user: str | None, reason: str, **options: Any) -> None:
        actor = user_named(user) if user else Program("stop_rule")
        rule = stop_rule(rule_named(name, scope).pk, actor, reason)
        self.tell({"rule": str(rule), "status": rule.status}, f"Rule {rule} is {rule.status}.")
