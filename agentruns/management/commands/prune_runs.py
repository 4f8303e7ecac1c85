from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agentruns.management.base import COUNT, AgentRunsCommand, Stop, argument, flag, number, usage
from agentruns.services.data.retention import count_ended, erase_session, prune_ended
from agentruns.utils.redaction import redact

LONGEST = 36_500  # days
DAYS = number(int, lambda days: 1 <= days <= LONGEST, f"give days, from 1 to {LONGEST}")


class Command(AgentRunsCommand):
    help = (
        "Delete whole sessions all of whose runs have ended: their journal, approvals, answers and files. "
        "A tombstone keeps their idempotency keys refused. Exit 1 if one could not be deleted."
    )

    one_of = (
        argument("--older-than", "Sessions unchanged for this many days.", type=DAYS, metavar="DAYS"),
        argument("--session", "This session, now: for a request of erasure.", metavar="KEY"),
    )
    arguments = (
        argument("--scope", "With --session: its scope, if several have its key.", metavar="S"),
        argument("--limit", "At most N sessions, oldest first.", type=COUNT, metavar="N"),
        flag("--dry-run", "Only count the sessions to delete."),
        flag("--forget-key", "With --session: keep a hash in place of the session's key."),
    )

    def act(self, *, session: str | None, limit: int | None, dry_run: bool, **options: Any) -> bool:
        scope, forget_key, days = options["scope"], options["forget_key"], options["older_than"]
        if session is not None and (limit or dry_run):
            usage("--limit and --dry-run go with --older-than only.")
        if session is None and (forget_key or scope is not None):
            usage("--forget-key and --scope go with --session only.")
        if session is not None:
            pruned = erase_session(session, scope=scope, forget_key=forget_key)
        elif dry_run:
            pruned = count_ended(days)
        else:
            with Stop() as stop:
                pruned = prune_ended(days, limit=limit, should_stop=stop)
        copied = "was forked from it and holds copies of its rows."
        copies = [f"Session {key!r} {copied}" for key in pruned.copies]
        texts = {name: [redact(text) for text in getattr(pruned, name)] for name in ("refused", "copies")}
        counts = {name: value for name, value in asdict(pruned).items() if isinstance(value, int) and value}
        counted = ", ".join(f"{name} {value}" for name, value in counts.items()) or "nothing"
        record = {**asdict(pruned), **texts}
        self.tell(record, *pruned.refused, f"{'To be pruned' if dry_run else 'Pruned'}: {counted}.", *copies)
        return bool(pruned.refused)
