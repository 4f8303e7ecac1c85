"""`manage.py erase --row RUN SEQ | --user NAME | --session KEY`: destroy content for good."""

from __future__ import annotations

from typing import Any

from agentruns.journal.events import Program
from agentruns.management.base import SESSIONS_SCOPE, AgentRunsCommand, argument, flag, usage, user_named
from agentruns.services.data.erasure import Erased, erase_rows, erase_user, erase_whole_session
from agentruns.utils.redaction import redacted

ACTOR = Program("erase")


class Command(AgentRunsCommand):
    help = (
        "Destroy the content of a journal row, of all rows of a user's sessions, or a whole session, with "
        "what repeats it. The chain stays, and says who erased what and why. Exit 1 if something was refused."
    )

    one_of = (
        argument("--row", nargs=2, metavar=("RUN", "SEQ"), help="One row, and what repeats it."),
        argument("--user", metavar="NAME", help="Every row of the sessions that this user owns."),
        argument("--session", metavar="KEY", help="A session with its journal; its keys are hashed."),
    )
    arguments = (
        SESSIONS_SCOPE,
        argument("--reason", default="", metavar="TEXT", help="Kept in the journal; not for --session."),
        flag("--dry-run", "Only say what would go."),
    )

    def act(self, *, row: list[str] | None, user: str | None, session: str | None, **options: Any) -> bool:
        scope, reason, dry_run = options["scope"], options["reason"], options["dry_run"]
        if session is None and not reason.strip():
            usage("Give a --reason: it is kept in the journal.")
        if session is None and scope is not None:
            usage("--scope goes with --session only.")
        if row is not None:
            if not row[1].isdecimal():
                usage("SEQ is the number of a row.")
            erased = erase_rows(row[0], ACTOR, reason, seq=int(row[1]), dry_run=dry_run)
        elif user is not None:
            owner = user_named(user, is_active=False)  # the account may be closed already
            erased = erase_user(owner, ACTOR, reason, dry_run=dry_run)
        else:
            erased = erase_whole_session(session or "", scope=scope, dry_run=dry_run)
        record = redacted(erased.record())
        counts = {"rows": len(erased.rows), **{name: record[name] for name in Erased.COUNTS}}
        counted = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing"
        self.tell(
            {**record, "dry_run": dry_run},
            *(f"Run {run}, row {seq} ({kind})" for run, seq, kind in erased.rows),
            *record["refused"],
            f"{'To be erased' if dry_run else 'Erased'}: {counted}.",
            "Not reached:",
            *(f"- {place}" for place in record["not_reached"]),
        )
        return bool(erased.refused)
