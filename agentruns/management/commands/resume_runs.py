"""`manage.py resume_runs`: sweep until no run can go on, or with --watch until a signal stops it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections, connections

from agentruns import get_run
from agentruns.conf import settings
from agentruns.engine import leases
from agentruns.engine.children import MAX_DEPTH
from agentruns.engine.wakeup import Listener
from agentruns.journal.masking import masked_runs
from agentruns.management import base, timeline
from agentruns.management.base import COUNT, AgentRunsCommand, Stop, argument, flag, number, usage
from agentruns.services.runs.waiting import standing
from agentruns.services.sweep import Crew, Swept, candidates, crew_of, hold_all, sweep
from agentruns.utils.redaction import get_logger, redact

logger = get_logger("agentruns.sweep")

EAGER = 8  # after a sweep that drove a run, the next sweep comes this many times sooner
ROUND = 10.0  # seconds after which a sweep begins no further run, so that other due work is done
CONCURRENCY = 16  # runs that a worker drives at once: most of the time each waits for a model
MOMENT = 0.1  # seconds until an idle worker notices a signal
SECONDS = number(float, lambda seconds: 0 < seconds < 86_400, "give seconds, more than 0 and less than a day")


class Command(AgentRunsCommand):
    help = "Drive every run that can go on: after a crash, a decision, a back-off, or just queued."
    # A timer may start it every minute, and the project's checks would load the URLs, which no run needs.
    requires_system_checks = ("agentruns",)

    arguments = (
        flag("--watch", "Keep sweeping until SIGTERM or Ctrl-C."),
        argument(
            "--interval",
            "Maximum seconds between sweeps that find nothing (1).",
            type=SECONDS,
            default=1.0,
            metavar="S",
        ),
        argument(
            "--concurrency",
            f"With --watch, drive at most N runs at once ({CONCURRENCY}).",
            type=COUNT,
            default=CONCURRENCY,
            metavar="N",
        ),
        argument("--limit", "Drive at most N runs; with --watch, per sweep.", type=COUNT, metavar="N"),
        argument("--run", "Only this run.", metavar="ID"),
        flag("--dry-run", "Only list the runs that can go on."),
        flag("--no-drive", "Notify a worker for each run instead of driving it here."),
        flag(
            "--surface-orphans",
            "Also take runs with calls in doubt: tell the model that the outcome is unknown.",
        ),
        flag(
            "--hold-all",
            "Hold every unfinished run for staff: after restoring a backup, before any worker starts.",
        ),
    )

    def act(self, *, watch: bool, dry_run: bool, **options: Any) -> bool:
        if watch and dry_run:
            usage("--watch and --dry-run contradict each other: one keeps driving runs, one drives none.")
        if options["run"]:
            get_run(options["run"])
        if options["hold_all"]:
            if watch or dry_run or options["surface_orphans"] or options["run"]:
                usage("--hold-all stands alone: it holds every unfinished run and drives none.")
            held = hold_all()
            self.tell({"held": held}, f"Held {'1 run' if held == 1 else f'{held} runs'} for staff.")
            return False
        which = {"run_id": options["run"], "limit": options["limit"]}
        if dry_run:
            runs = candidates(**which)
            if self.json:
                for run in runs:
                    self.say_json({"id": run.pk, "agent": redact(run.agent), "status": run.status})
                return False
            heading, rows = ("RUN", "STATUS", "AGENT", "SESSION", "INPUT"), list[tuple[object, ...]]()
            for run in masked_runs(runs):
                rows.append((run.pk, run.status, run.agent, run.session.key, base.shortened(run.input, 50)))
            alias, run_id = settings.DATABASE, options["run"]
            none = () if rows else (timeline.idle(standing(alias, run_id)), *timeline.unserved(alias, run_id))
            self.tell(None, *(base.table([heading, *rows]) if rows else none))
            return False
        which |= {"drives": not options["no_drive"], "tell_model": options["surface_orphans"]}
        with Stop() as stop:
            if watch:
                size = 1 if options["no_drive"] else options["concurrency"]
                crew = crew_of(size, stop, options["run"])
                drives = f", up to {crew.size} at once" if crew else ""
                self.tell(None, f"Process {os.getpid()} watches for runs that can go on{drives}.")
                with Listener(settings.DATABASE) as bell:
                    which |= {"seconds": ROUND, "crew": crew}
                    try:
                        self._attend(bell, which, stop, options["interval"])
                    finally:
                        if crew is not None:  # after an error, too, each drive ends at its next boundary
                            stop.asked = True
                            crew.join()
                self.tell(None, "Stopped.")
                return False
            swept = last = sweep(**which, should_stop=stop)
            for _again in range(2 * MAX_DEPTH):  # down a family, and up again as its child runs end
                left = options["limit"] and max(options["limit"] - swept.found, 0)
                if not last.driven or last.errors or left == 0 or stop():
                    break
                last = sweep(**which | {"limit": left}, should_stop=stop)
                swept.add(last)
        shows_rest = self.json or not any(swept.as_dict().values())
        stands = standing(settings.DATABASE, options["run"]) if shows_rest else {}
        stands |= {"ready": len(candidates(options["run"]))} if swept.driven or self.json else {}
        self._report(swept, stands, options["run"])
        return bool(swept.errors)

    def _attend(self, bell: Listener, which: dict[str, Any], stop: Stop, interval: float) -> None:
        said, polls, pause, due = False, False, interval / EAGER, 0.0
        crew: Crew | None = which["crew"]
        while not stop():
            bell.listen()
            if bell.why_deaf and not polls:
                polls = True
                self.tell(None, f"{bell.why_deaf}: it looks every {interval:g} s.")
            close_old_connections()
            swept = Swept()
            try:
                if crew is None or time.monotonic() >= due:
                    swept = sweep(**which, should_stop=stop)
                    due = time.monotonic() + interval / EAGER
                else:  # each row of SQLite rings, and a sweep does more than start drives
                    crew.fill(more=True)
            except Exception:  # such as no database; the next sweep tries again
                logger.exception("Sweep failed; trying again")
                connections.close_all()
            if crew is not None:
                swept.add(crew.take())
            with suppress(DatabaseError, InterfaceError):  # checked again after the next sweep
                if not said and (said := leases.is_draining(settings.DATABASE)):
                    logger.warning("Draining pid=%s: claims no run any more", os.getpid())
                    why = "Draining: this process claims no more runs. Stop it when the new code is up."
                    self.tell(None, why)
            self._report_news(swept, which["run_id"])
            more_may_follow = swept.driven or _wait(pause, stop, bell)
            pause = interval / EAGER if more_may_follow else min(2 * pause, interval)
        if crew is not None:
            crew.join()
            self._report_news(crew.take(), which["run_id"])

    def _report_news(self, swept: Swept, run_id: str | None) -> None:
        news = ("driven", "surfaced", "expired", "reminded", "settled", "errors", "blocked")
        if any(getattr(swept, name) for name in news):
            self._report(swept, {}, run_id)

    def _report(self, swept: Swept, stands: dict[str, Any], run_id: str | None) -> None:
        if self.json:
            self.say_json({**swept.as_dict(), **stands})
            return
        alias, lines = settings.DATABASE, list[str]()
        with suppress(DatabaseError, InterfaceError):  # a failed report must not end a worker
            lines += [*timeline.for_people(alias, swept.left)] if swept.left else []
            lines += [*timeline.unserved(alias, run_id)] if swept.blocked or stands.get("unserved") else []
        if ready := stands.get("ready"):
            lines.append(f"{'1 run' if ready == 1 else f'{ready} runs'} can go on now.")
        counts = ", ".join(f"{name} {count}" for name, count in swept.as_dict().items() if count)
        self.tell(None, counts or timeline.idle(stands), *lines)


def _wait(seconds: float, stop: Stop, bell: Listener) -> bool:
    """Wait at most `seconds` until the doorbell rings or a signal comes; return True if it rang."""
    until = time.monotonic() + seconds
    while not stop() and (left := until - time.monotonic()) > 0:
        if bell.rang(min(left, MOMENT)):
            return True
    return False
