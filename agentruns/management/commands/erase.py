from __future__ import annotations

from typing import Any

from agentruns.journal.events import Program
from agentruns.management.base import CUSTOMER, AgentRunsCommand, argument, customer, flag, usage
from agentruns.services.data.erasure import Erased, erase_customer, erase_rows, erase_whole_session
from agentruns.utils.redaction import redacted

ACTOR = Program("erase")


class Command(AgentRunsCommand):
    help = (
        "Destroy the content of a journal row, of all rows of a customer's sessions, or of a session, with "
        "what repeats it. The chain stays, and says who erased what and why. Exit 1 if something was refused."
    )

    arguments = (
        argument("--row", "One row, and what repeats it.", nargs=2, metavar=("RUN", "SEQ")),
        argument("--session", "A session with its journal; its keys are hashed.", metavar="KEY"),
        argument("--user", "As --owner.", dest="owner", metavar="NAME"),
        *CUSTOMER,
        argument("--reason", "Kept in the journal; not for --session.", default="", metavar="TEXT"),
        flag("--people", "Delete the customer's sessions with their rows, and so with people's names."),
        flag("--dry-run", "Only say what would go."),
    )

    def act(self, *, row: list[str] | None, session: str | None, scope: str | None, **options: Any) -> bool:
        reason, dry_run = options["reason"], options["dry_run"]
        whose = customer(options["owner"], scope if session is None else None, options["context"])
        if [row is not None, session is not None, bool(whose)].count(True) != 1:
            usage("Give --row, --session, or a customer by --owner, --scope and --context.")
        if options["people"] and not whose:
            usage("Give --people with a customer: --session deletes a session's names already.")
        if session is None and not reason.strip():
            usage("Give a --reason: it is kept in the journal.")
        if row is not None:
            if not row[1].isdecimal():
                usage("SEQ is the number of a row.")
            erased = erase_rows(row[0], ACTOR, reason, seq=int(row[1]), dry_run=dry_run)
        elif whose:
            erased = erase_customer(ACTOR, reason, **whose, dry_run=dry_run, people=options["people"])
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
