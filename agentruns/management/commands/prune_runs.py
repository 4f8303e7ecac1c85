"""`manage.py prune_runs --older-than DAYS | --session KEY`: delete ended sessions, or one for good."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from typing import Any

from agentruns.management.base import WRONG, AgentRunsCommand, Stop, count_of, usage
from agentruns.services.retention import Pruned, count_ended, erase_session, prune_ended
from agentruns.utils.redaction import redact

LONGEST = 36_500  # days


class Command(AgentRunsCommand):
    help = (
        "Delete whole sessions all of whose runs have ended: their journal, approvals, answers and files. "
        "A tombstone keeps their idempotency keys refused. Exit 1 if one could not be deleted."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument(
            "--older-than",
            type=_days,
            metavar="DAYS",
            help="Sessions unchanged for this many days.",
        )
        which.add_argument("--session", metavar="KEY", help="This session, now: for a request of erasure.")
        parser.add_argument(
            "--scope", metavar="S", help="With --session: its scope, if several have its key."
        )
        parser.add_argument("--limit", type=count_of, metavar="N", help="At most N sessions, oldest first.")
        parser.add_argument("--dry-run", action="store_true", help="Only count the sessions to delete.")
        parser.add_argument(
            "--forget-key",
            action="store_true",
            help="With --session: keep a hash in place of the session's key.",
        )

    def act(
        self,
        *,
        older_than: int | None,
        session: str | None,
        scope: str | None,
        limit: int | None,
        dry_run: bool,
        forget_key: bool,
        json: bool,
        **options: Any,
    ) -> None:
        if session is not None and (limit or dry_run):
            usage("--limit and --dry-run go with --older-than only.")
        if session is None and (forget_key or scope is not None):
            usage("--forget-key and --scope go with --session only.")
        if session is not None:
            pruned = erase_session(session, scope=scope, forget_key=forget_key)
        elif dry_run:
            pruned = count_ended(older_than or 0)
        else:
            with Stop() as stop:
                pruned = prune_ended(older_than or 0, limit=limit, should_stop=stop)
        if json:
            self.say_json(_redacted(pruned))
        elif dry_run:
            self.say(f"To be pruned: {_counts(pruned)}.")
        else:
            self._report(pruned)
        if pruned.refused:
            sys.exit(WRONG)

    def _report(self, pruned: Pruned) -> None:
        for why in pruned.refused:
            self.say(why)
        self.say(f"Pruned: {_counts(pruned)}.")
        for key in pruned.copies:
            self.say(f"Session {key!r} was forked from it and holds copies of its rows.")


def _counts(pruned: Pruned) -> str:
    counts = {name: value for name, value in asdict(pruned).items() if isinstance(value, int)}
    return ", ".join(f"{name} {value}" for name, value in counts.items() if value) or "nothing"


def _redacted(pruned: Pruned) -> dict[str, Any]:
    texts = {name: [redact(text) for text in getattr(pruned, name)] for name in ("refused", "copies")}
    return {**asdict(pruned), **texts}


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= LONGEST:
        raise ArgumentTypeError(f"give days, from 1 to {LONGEST}")
    return days
