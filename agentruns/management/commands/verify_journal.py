from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import UUID

from django.db import connections

from agentruns.conf import settings
from agentruns.exceptions import AmbiguousSessionError, SessionAccessDeniedError
from agentruns.journal import anchor, verify
from agentruns.management.base import AgentRunsCommand, argument, escaped, flag, usage
from agentruns.models import Session, triggers
from agentruns.services.data.repair import Repaired, repair_session, value_of
from agentruns.services.data.retention import revived
from agentruns.services.runs.sessions import find_session
from agentruns.utils.redaction import redact, redacted

PAGE = 200
INSTALLED = "The triggers of the journal were installed again."
REVIVED = "was pruned and is there again: the database would let its rows be deleted."
REFUSED = "not repaired: the journal itself is wrong, so nothing can be folded from it."


class Command(AgentRunsCommand):
    help = "Check the journal and the columns folded from it; exit 1 if anything is, or stays, wrong."

    arguments = (
        argument("--session", "Only this session.", metavar="KEY"),
        argument("--scope", "The session's scope, if several have its key.", metavar="S"),
        flag(
            "--repair",
            "Rewrite folded columns from the journal and install the triggers again; "
            "journal rows and leases are never touched.",
        ),
        argument(
            "--anchors",
            "Also compare the heads in this file: JSON lines of session, seq and head, as "
            "AGENTRUNS_ANCHOR was given them.",
            metavar="FILE",
        ),
    )

    def act(self, *, session: str | None, scope: str | None, repair: bool, **options: Any) -> bool:
        alias, anchors = settings.DATABASE, options["anchors"]
        self.counts = {"sessions": 0, "bad_sessions": 0, "problems": 0, "repaired": 0}
        if scope is not None and session is None:
            usage("--scope goes with --session only.")
        try:
            only = None if session is None else find_session(session, scope).pk
        except (SessionAccessDeniedError, AmbiguousSessionError) as error:
            usage(escaped(error))
        connection = connections[alias]
        if (wrong := triggers.differences(connection)) and repair:
            triggers.install(connection)
            if (left := triggers.differences(connection)) != wrong:
                self.tell({"repaired": INSTALLED}, INSTALLED)
                self.counts["repaired"] += 1
            wrong = left  # foreign triggers stay
        for what in wrong:
            self._report(verify.Problem("", what), what)
        self.revived = {session.pk: verify.Problem(session.key, REVIVED) for session in revived(alias)}
        # In pages, because on SQLite an open cursor over all sessions would block the writes of a repair.
        sessions = Session.objects.using(alias).order_by("pk").values_list("pk", flat=True)
        page = list(sessions[:PAGE]) if only is None else [only]
        while page:
            for session_id in page:
                with suppress(Session.DoesNotExist):  # pruned meanwhile
                    self._session(alias, session_id, repair)
            page = list(sessions.filter(pk__gt=page[-1])[:PAGE]) if only is None else []
        for problem in verify.strays(alias) if only is None else ():
            self._report(problem, str(problem))
        if anchors is not None:
            try:
                with open(anchors, encoding="utf-8") as lines:
                    compared = anchor.Compared(alias, lines, only)
                    for problem in compared.problems():
                        self._report(problem, str(problem))
            except (OSError, ValueError) as error:
                usage(f"{escaped(anchors)} cannot be read: {error}")
            self.counts |= {"anchors": compared.anchors, "anchors_of_pruned": compared.pruned}
        counts = self.counts
        text = f"Sessions checked: {counts['sessions']}. "
        if repair:
            text += f"Repaired: {counts['repaired']}. "
        if "anchors" in counts:
            text += f"Anchors compared: {counts['anchors']}, "
            text += f"of pruned sessions: {counts['anchors_of_pruned']}. "
        text += f"Problems: {counts['problems']}." if counts["problems"] else "Nothing is wrong."
        self.tell({"summary": counts}, text)
        return bool(self.counts["problems"])

    def _session(self, alias: str, session_id: UUID, repair: bool) -> None:
        repaired = Repaired([], verify.check(session_id, alias))
        if repaired.left and repair:
            files = [problem for problem in repaired.left if problem.file]
            repaired = repair_session(alias, session_id)
            repaired.left.extend(files)
        if session_id in self.revived:
            repaired.left.append(self.revived[session_id])
        self.counts["sessions"] += 1
        self.counts["bad_sessions"] += bool(repaired.changed or repaired.left)
        for problem in repaired.changed:
            row = f"run {problem.run}: " if problem.run else ""
            row = f"approval {problem.approval}: " if problem.approval else row
            text = f"{row}{problem.column} rewritten"
            if problem.column != "arguments":  # which may hold secrets
                value = verify.stored_form(problem.model, problem.column, value_of(problem))
                before, after = redacted([problem.stored, value])
                text += f" from {verify.shown(before)} to {verify.shown(after)}"
            text += "."
            self.tell_of(problem, f"Session {problem.session}: {text}", repaired=redact(text))
            self.counts["repaired"] += 1
        for problem in repaired.left:
            self._report(problem, str(problem))
            if repair and problem.seq is not None and not problem.file:
                self.tell_of(problem, f"Session {problem.session}: {REFUSED}", refused=REFUSED)

    def _report(self, problem: verify.Problem, text: str) -> None:
        self.counts["problems"] += 1
        self.tell_of(problem, text, problem=redact(problem.what))

    def tell_of(self, problem: verify.Problem, text: str, /, **record: str) -> None:
        """Print `text`, a line about a problem; with --json, print only `record` and the problem's place."""
        names = ("seq", "kind", "run", "approval", "column")
        place = {"session": redact(problem.session), **{name: getattr(problem, name) for name in names}}
        self.tell({**{name: value or None for name, value in place.items()}, **record}, text)
