from __future__ import annotations

from agentruns.exceptions import ToolRefused
from agentruns.management.base import AgentRunsCommand, argument, usage
from agentruns.tools import ToolContext
from agentruns.tools.mcp import Server, servers

NOBODY = ToolContext(run_id="", call_id="", tool_name="", idempotency_key="")


class Command(AgentRunsCommand):
    help = "Ask the MCP servers that agents declare for their tools, and write their lock files."
    requires_system_checks = ()  # a check fails without the lock files

    arguments = (
        argument("names", "Servers by name (all).", nargs="*", metavar="NAME"),
        argument("--check", "Only compare; exit 1 if one differs.", action="store_true"),
    )

    def act(self, *, names: list[str], check: bool, **options: object) -> bool:
        known = {server.name: server for server in servers()}
        if unknown := sorted({*names} - {*known}):
            usage(f"There is no MCP server {', '.join(unknown)}. Declared: {', '.join(known) or 'none'}.")
        return bool([name for name in names or known if self.lock(known[name], check)])

    def lock(self, server: Server, check: bool) -> bool:
        """Write a server's lock file, or with `check` only compare it with the server's tools.

        Returns True if the server cannot be reached, or if the compared file differs or is missing.
        """
        record = {"server": server.name, "file": str(server.file)}
        try:
            listed = server.listed(NOBODY)
        except ToolRefused as error:
            self.tell({**record, "error": str(error)}, f"{server.name}: {error}")
            return True
        changed = server.difference(listed, {*(server.locked or {}), *(str(each["name"]) for each in listed)})
        if not check:
            server.file.write_text(server.lock_text(listed))
        said = f"{len(listed)} tools" + (f"; changed: {', '.join(changed)}" if changed else "")
        self.tell({**record, "changed": changed}, f"{server.name}: {said} ({server.file})")
        return check and bool(changed or server.locked is None)
