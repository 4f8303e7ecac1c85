from __future__ import annotations

from typing import Any

from agentruns import get_run
from agentruns.conf import settings
from agentruns.engine import turns
from agentruns.exceptions import JournalUnreadableError
from agentruns.journal import masking, outsiders, read
from agentruns.management import timeline
from agentruns.management.base import RUN_ID, AgentRunsCommand, argument, moment
from agentruns.models import Approval
from agentruns.services.history import record, state_at
from agentruns.services.runs import waiting
from agentruns.tools.card import members_text
from agentruns.utils.redaction import redact, redacted


class Command(AgentRunsCommand):
    help = "Show a run and its journal."

    arguments = (
        RUN_ID,
        argument("--at", "The run's state after this row, as JSON.", type=int, metavar="SEQ"),
    )

    def act(self, *, run_id: str, at: int | None, **options: Any) -> None:
        run = get_run(run_id)
        mask = masking.mask_of(run)
        waits = waiting.events_of(settings.DATABASE, [run], {run.session_id: mask}).get(run.pk, [])
        if at is not None:
            self.say_json(redacted(record(state_at(run.pk, at), mask)))
            return
        readers = [*outsiders.read_by(settings.DATABASE, run)]
        if self.json:
            rows = [timeline.as_dict(mask.row(row)) for row in read.run_rows(settings.DATABASE, run.pk)]
            facts = {**timeline.run_record(mask.run(run), waits), "untrusted": readers}
            self.say_json({**facts, "messages": rows})
            return
        run = mask.run(run)
        imported = run.session.imported_at
        facts = {
            "run": run.pk,
            "status": run.status,
            "agent": f"{run.agent} version {run.version}",
            "session": run.session.key,
            "owner": run.owner_name,
            "parent": run.parent_id,
            "imported": imported and f"{moment(imported)} UTC: a record, decided in another database",
            "created": f"{moment(run.created_at)} UTC",
            "updated": f"{moment(run.updated_at)} UTC",
            "steps": run.step,
            "usage": ", ".join(f"{name} {count}" for name, count in run.usage.items() if name != "cost"),
            "cost": run.usage.get("cost"),
            "lease until": moment(run.lease_expires_at),
            "not before": moment(run.not_before),
            "attempts": run.attempts,
            "blocked": turns.reasons(settings.DATABASE, [run]).get(run.pk) or run.blocked_reason,
            "input": run.input,
            "output": run.output,
            "error": run.error,
            "has read": readers and f"text that outsiders wrote, by {', '.join(readers)}",
        }
        header: list[tuple[str, object]] = [(label, value) for label, value in facts.items() if value]
        approvals = Approval.objects.using(settings.DATABASE).filter(run_id=run.pk).pending()
        for approval in map(mask.approval, approvals.order_by("requested_at")):
            card = f"{approval.title} (approval {approval.pk}, digest {approval.digest[:12]})"
            held = [] if approval.holds is None else [("", f"Holds: {members_text(approval.holds)}")]
            header += [("waits for", card), *held, ("", timeline.to_decide(approval))]
        header += [("waits for", timeline.waits_for(wait)) for wait in waits]
        for doubt in waiting.uncleared(settings.DATABASE, run, mask):
            if doubt.run_id == run.pk:
                step = timeline.verdict(run.pk, doubt.call_id)
                header.append(("in doubt", f"did {doubt.tool} happen? Nobody knows: {step}"))
        for label, value in header:
            for number, text in enumerate(redact(str(value)).splitlines()):
                self.say(f"{'' if number else label:<14}{text}")
        self.say()
        try:
            lines = [timeline.line(mask.row(row)) for row in read.run_rows(settings.DATABASE, run.pk)]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text = f"The journal of run {run.pk} cannot be read: manage.py verify_journal names the row."
            raise JournalUnreadableError(text) from error
        for line in lines:
            self.say(line)
