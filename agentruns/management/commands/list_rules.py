from __future__ import annotations

from typing import Any

from agentruns.journal.rules import sentence
from agentruns.management.base import AgentRunsCommand, argument, shortened, table
from agentruns.models import ApprovalRule
from agentruns.services.rules import list_rules


class Command(AgentRunsCommand):
    help = "List standing rules, the newest version of each name first."

    arguments = (
        argument("--status", "Only rules with this status.", choices=ApprovalRule.Status.values),
        argument("--agent", "Only rules for this agent."),
    )

    def act(self, *, status: str | None, agent: str | None, **options: Any) -> None:
        given = {"status": status, "agent": agent}
        rules = [*list_rules().filter(**{name: value for name, value in given.items() if value})]
        for rule in rules if self.json else ():
            names = ("id", "name", "version", "scope", "agent", "tool", "status", "why")
            self.say_json({**{name: getattr(rule, name) for name in names}, "sentence": sentence(rule)})
        rows = [(each, each.scope, each.status, each.agent, shortened(sentence(each))) for each in rules]
        heading = ("RULE", "SCOPE", "STATUS", "AGENT", "WHAT IT DOES")
        self.tell(None, *(table([heading, *rows]) if rows else ["There are no such rules."]))
