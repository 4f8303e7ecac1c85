"""`manage.py switch off|on --agent NAME | --tool NAME`: the kill switch; `switch list`: what is off."""

from __future__ import annotations

from django.core.management.base import CommandError

from agentruns.management.base import USAGE, AgentRunsCommand, argument, user_named
from agentruns.services import switches


class Command(AgentRunsCommand):
    help = "Switch an agent or a tool off: its runs wait, its calls are refused. Or list what is off."

    arguments = (
        argument("state", choices=["off", "on", "list"], help="off, on, or list what is off."),
        argument("--agent", metavar="NAME", help="The agent whose runs are to wait."),
        argument("--tool", metavar="NAME", help="The tool whose calls are to be refused."),
        argument("--reason", default="", metavar="TEXT", help="With off: shown to staff."),
        argument("--user", metavar="NAME", help="The user who does it, with the permission to."),
    )

    def act(
        self,
        *,
        state: str,
        agent: str | None,
        tool: str | None,
        reason: str,
        user: str | None,
        **options: object,
    ) -> None:
        if state == "list":
            for (kind, name), one in switches.switched_off().items():
                about = {"by": one.actor, "reason": one.reason, "since": one.seen_at}
                text = f"{kind} {name} is off: {one.reason} ({one.actor or 'the program'})"
                self.tell({"kind": kind, "name": name, **about}, text)
            return
        if (agent is None) == (tool is None):
            raise CommandError("Give --agent or --tool.", returncode=USAGE)
        kind, name = ("agent", agent or "") if tool is None else ("tool", tool)
        actor = user_named(user) if user else None
        try:
            changed = switches.switch(kind, name, state, actor, reason=reason)
        except ValueError as error:
            raise CommandError(str(error), returncode=USAGE) from None
        record = {"kind": kind, "name": name, "state": state, "changed": changed}
        already = "" if changed else " already"
        self.tell(record, f"The {kind} {name} {'is' if changed else 'was'} {state}{already}.")
