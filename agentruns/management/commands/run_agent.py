from __future__ import annotations

from typing import Any

from agentruns import get_run, run_agent
from agentruns.agents.agent import get_agent
from agentruns.agents.output import shown
from agentruns.conf import settings
from agentruns.content import IMAGES, Document, File, Image, Input, Text, type_of
from agentruns.exceptions import ContentError, SessionBusyError
from agentruns.journal import events, masking
from agentruns.management import timeline
from agentruns.management.base import AgentRunsCommand, argument, escaped, usage, user_named
from agentruns.models import Run, tombstone
from agentruns.services.runs import sessions, waiting
from agentruns.utils import ids, redaction

BUSY, INTERRUPTED = 4, 130
EXIT: dict[str, int] = {Run.Status.COMPLETED: 0, Run.Status.FAILED: 1, Run.Status.CANCELLED: 5}
EXIT |= dict.fromkeys((Run.Status.QUEUED, Run.Status.RUNNING, Run.Status.WAITING), BUSY)
EXIT |= dict.fromkeys(waiting.FOR_PEOPLE, 3)


class Command(AgentRunsCommand):
    help = (
        "Run an agent until the run ends or waits. Exit code: 0 completed, 1 failed, 3 waiting for a person, "
        "4 queued, live elsewhere or waiting for an event, 5 cancelled. The same command again continues the "
        "same run. After a crash it tells the model that the outcome of a call in doubt is unknown, and goes "
        "on; resume_runs would leave the call to a person."
    )

    arguments = (
        argument("agent", "The agent's name.", metavar="AGENT"),
        argument("text", "The task."),
        argument("--session", "The session's key (a new one).", metavar="KEY"),
        argument("--scope", "The session's scope (that of the policy).", metavar="S"),
        argument("--idempotency-key", "The same key is the same run, also after it completed.", metavar="K"),
        argument("--file", "A picture or document; repeatable.", action="append", default=[], metavar="PATH"),
        argument("--user", "The user who owns the run.", metavar="NAME"),
    )

    def act(self, *, agent: str, text: str, **options: Any) -> int:
        if not text.strip():
            usage("The text is empty; say what the agent is to do.")
        actor = user_named(options["user"]) if options["user"] is not None else None
        key = options["idempotency_key"]
        _key, scope = sessions.place("", options["scope"], actor)
        runs = Run.objects.using(settings.DATABASE).filter(
            owner=actor, scope=scope, idempotency_key__in=tombstone.names_of(key or "")
        )
        known = key and runs.values_list("session__key", flat=True).first()
        session = options["session"] or known or f"run-{ids.uuid7()}"
        known_agent = get_agent(agent)
        mask, unknown = masking.Mask([known_agent.definition()]), list[str]()
        files = list[File]()
        for path in options["file"]:
            try:
                with open(path, "rb") as file:
                    kind = Image if type_of(file.read(16)) in IMAGES else Document
                files.append(kind(path=path))
            except (OSError, ContentError) as error:
                usage(str(error))
        given: Input = [Text(text), *files] if files else text

        def show(row: events.Row) -> None:
            if self.json:
                self.say_json(timeline.as_dict(mask.row(row)))
                return
            self.say(timeline.line(mask.row(row)))
            if row.kind == events.TOOL_RESULT and events.leaves_doubt(row.payload):
                unknown.append(row.call_id)

        try:
            with timeline.following(settings.DATABASE, session, scope, show):
                result = run_agent(known_agent, given, session, actor=actor, scope=scope, idempotency_key=key)
        except SessionBusyError as error:
            self.stderr.write(escaped(error))
            return BUSY
        except KeyboardInterrupt:
            self.stderr.write("Interrupted. The same command again, or resume_runs, goes on with the run.")
            return INTERRUPTED
        # The run's status and output, and what a person has to do if the run waits.
        run = get_run(str(result.run_id))
        run_mask = masking.mask_of(run)
        output, failure = run_mask.json(shown(result.output)), run_mask.json(result.error)
        if self.json:
            texts = {"session": result.session_key, "output": output, "error": failure}
            self.say_json({"run": result.run_id, "status": result.status, **redaction.redacted(texts)})
            return EXIT[result.status]
        self.say()
        self.say(f"Run {result.run_id} in session {result.session_key} is {result.status}.")
        for wait in waiting.events_of(settings.DATABASE, [run], {run.session_id: run_mask}).get(run.pk, ()):
            self.say(f"Waits for {timeline.waits_for(wait)}")
        for approval in map(run_mask.approval, result.pending):
            self.say(f"Waits for a person: {approval.title} (approval {approval.pk})")
            self.say(timeline.to_decide(approval))
        for call in result.orphans:
            self.say(f"Waits for a person: did call {call} happen?")
            self.say(f"Say what became of it: {timeline.verdict(str(result.run_id), call)}")
        if result.status == Run.Status.PAUSED:
            self.say(timeline.to_resume(get_run(str(result.run_id))))
        if many := len(unknown):
            calls, them = ("1 call", "it") if many == 1 else (f"{many} calls", "them")
            text = f"The outcome of {calls} is unknown, and the model is told so."
            self.say(f"{text} Say what became of {them}:")
        for call in unknown:
            self.say(timeline.verdict(str(result.run_id), call))
        is_held = result.status in (Run.Status.PAUSED, Run.Status.ORPHANED)  # the lines above say why
        for text in redaction.redact(output or failure).splitlines() if not is_held else ():
            self.say(text)
        return EXIT[result.status]
