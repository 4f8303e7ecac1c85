"""What a person can do about a run now, and what each button will do. Pure: values in, sentences out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from agentruns.admin.drift import Drift
from agentruns.admin.text import plain
from agentruns.admin.times import ago, exact
from agentruns.admin.waiting import Reason, backs_off, is_live
from agentruns.conf import settings
from agentruns.models import Run
from agentruns.tools.card import one_line

SILENT_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Action:
    """A button: what it will do, or why it cannot be pressed; `forbidden` says that the user may not."""

    effect: list[str]
    why_not: str = ""
    forbidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a run and of who looks at it."""

    run: Run
    reasons: list[Reason]
    cancel_requested: tuple[str, datetime] | None = None
    sweeper_seen: datetime | None = None
    uncleared: int = 0
    is_paused: bool = False
    pause_requested: tuple[str, datetime] | None = None
    may_resume: bool = False
    may_cancel: bool = False
    may_pause: bool = False
    may_adopt: bool = False

    @property
    def doubts(self) -> list[Reason]:
        """The calls in doubt that wait for a person."""
        return [reason for reason in self.reasons if reason.is_doubt]


def headline(situation: Situation) -> str:
    """Return in one sentence where the run stands and who has to act."""
    run = situation.run
    if run.status == Run.Status.COMPLETED:
        return _left_to_say(situation) or _("Completed. There is nothing to do.")
    if run.status == Run.Status.FAILED:
        return _("Failed: %(error)s") % {"error": one_line(plain(run.error))}  # in full below
    if run.status == Run.Status.CANCELLED:
        return _left_to_say(situation) or _("Cancelled. There is nothing to do.")
    if situation.cancel_requested is not None:
        name, when = situation.cancel_requested
        return _("%(name)s asked %(when)s to cancel it. It ends before its next tool starts.") % {
            "name": name,
            "when": ago(when),
        }
    if run.status == Run.Status.AWAITING_APPROVAL:
        return _("It waits for a person to decide:")
    if run.status == Run.Status.ORPHANED:
        return _("It waits for a person: nobody knows what became of a call.")
    if run.status == Run.Status.PAUSED:
        return _("It is paused, and goes on when somebody resumes it.")
    if situation.pause_requested is not None and is_live(run):
        name, when = situation.pause_requested
        return _("%(name)s asked %(when)s to pause it. It pauses before its next tool starts.") % {
            "name": name,
            "when": ago(when),
        }
    if run.status == Run.Status.RUNNING:
        return _("A worker is driving it.") if is_live(run) else _("Its worker has fallen silent.")
    if backs_off(run):
        return _("It waits a while, because its model failed.")
    return _("It is queued: the next free worker takes it.")


def notes(situation: Situation) -> list[str]:
    """Return what else a person should know now."""
    run, found = situation.run, []
    if run.status in (Run.Status.FAILED, Run.Status.CANCELLED):
        found.append(_("An ended run cannot be resumed. To redo the task, start a new run."))
    for doubt in situation.doubts:
        found.append(
            _("%(tool)s, attempt %(attempt)d: %(evidence)s It may have happened zero or one times.")
            % {"tool": doubt.tool, "attempt": doubt.attempt, "evidence": doubt.evidence}
        )
    if run.status in (Run.Status.QUEUED, Run.Status.RUNNING) and not is_live(run):
        found += _about_workers(situation.sweeper_seen)
    return found


def resume(situation: Situation) -> Action:
    """Return what Resume will do, or why it cannot be done."""
    run = situation.run
    effect = _resume_effect(situation)
    why_not = _why_not_resume(situation)
    if why_not:
        return Action(effect, why_not)
    if not situation.may_resume:
        return Action(effect, missing("agentruns.resume_run"), forbidden=True)
    if run.status == Run.Status.QUEUED and not backs_off(run):
        return Action(effect, _("It is queued already; a worker takes it without being asked."))
    return Action(effect)


def pause(situation: Situation) -> Action:
    """Return what Pause will do, or why it cannot be done."""
    run = situation.run
    if is_live(run):
        effect = [
            _("The worker pauses it before its next tool starts."),
            _("A tool that is at work now is finished, and its result is kept."),
        ]
    else:
        effect = [_("The run is paused now.")]
    if run.status == Run.Status.AWAITING_APPROVAL:
        effect.append(_("People can still decide meanwhile. What they approve is run after Resume."))
    effect.append(_("Nothing but Resume lets it go on. The time until then does not count for its deadline."))
    if run.is_ended:
        return Action(effect, _("It has ended: %(status)s.") % {"status": run.get_status_display()})
    if situation.cancel_requested is not None:
        return Action(effect, _("It is being cancelled."))
    if situation.is_paused:
        return Action(effect, _("It is paused already."))
    if situation.pause_requested is not None and is_live(run):
        return Action(effect, _("It is being paused."))
    if not situation.may_pause:
        return Action(effect, missing("agentruns.pause_run"), forbidden=True)
    return Action(effect)


def adopt(situation: Situation, drift: Drift) -> Action:
    """Return what Adopt will do, or why it cannot be done."""
    run = situation.run
    effect = [
        _("From its next step on the run uses what is registered now: model, instructions, tools, limits."),
        _("A call that has started is still judged by what its tool declared when it started."),
        _("Approvals keep the arguments that were shown; a call that no longer fits its tool is refused."),
        _("The journal keeps both definitions and your name. What has happened already stays as it is."),
    ]
    if situation.is_paused:
        effect.append(_("It stays paused until somebody resumes it."))
    if run.is_ended:
        return Action(effect, _("It has ended: %(status)s.") % {"status": run.get_status_display()})
    if situation.cancel_requested is not None:
        return Action(effect, _("It is being cancelled."))
    if drift.agent is None:
        return Action(effect, _("This process does not know the agent: there is nothing to adopt."))
    if drift.is_served:
        return Action(effect, _("Its own definition is registered: there is nothing to adopt."))
    if is_live(run):
        return Action(effect, _("A worker that has the old definition is driving it. Pause it first."))
    if not situation.may_adopt:
        return Action(effect, missing("agentruns.adopt_definition"), forbidden=True)
    return Action(effect)


def verify() -> Action:
    """Return what Verify chain will do."""
    return Action(
        [
            _("Every row of the session's journal is read: its hash, its place, and what belongs to it."),
            _("Then what is shown of runs and approvals is compared with the journal."),
            _("Nothing is changed and nothing is stored. A long journal takes a while."),
        ]
    )


def cancel(situation: Situation) -> Action:
    """Return what Cancel will do, or why it cannot be done."""
    run = situation.run
    if is_live(run):
        effect = [
            _("The worker stops before its next tool starts."),
            _("A tool that is at work now is finished, and its result is kept."),
        ]
    else:
        effect = [_("The run ends now. It cannot be resumed afterwards.")]
    effect.append(
        _("Open approvals are cancelled. A call that started and has no result is recorded as unknown.")
    )
    if run.is_ended:
        return Action(effect, _("It has ended: %(status)s.") % {"status": run.get_status_display()})
    if situation.cancel_requested is not None and is_live(run):
        patience = timedelta(seconds=settings.LEASE_SECONDS)
        if timezone.now() - situation.cancel_requested[1] < patience:
            return Action(effect, _("It is being cancelled."))
        effect = [
            _("The worker did not honour the first request. The run is taken from it and ends now."),
            _("A call that is at work is recorded as unknown; what it still returns is kept as evidence."),
        ]
    if not situation.may_cancel:
        return Action(effect, missing("agentruns.cancel_run"), forbidden=True)
    return Action(effect)


def _left_to_say(situation: Situation) -> str:
    count, status = situation.uncleared, capfirst(situation.run.get_status_display())
    if not count:
        return ""
    return ngettext(
        "%(status)s. What is left to do is to say what became of a call:",
        "%(status)s. What is left to do is to say what became of %(count)d calls:",
        count,
    ) % {"status": status, "count": count}


def _resume_effect(situation: Situation) -> list[str]:
    effect = []
    for doubt in situation.doubts:
        effect.append(
            _("The model is told that the outcome of %(tool)s is unknown, and decides what to do.")
            % {"tool": doubt.tool}
        )
    if situation.doubts:
        effect.append(
            _("Calls it asked for after that in the same reply are not run; their approvals are cancelled.")
        )
    if situation.run.status == Run.Status.RUNNING:
        effect.append(
            _(
                "If its worker was inside a tool, that call is repeated where the tool says that is safe; "
                "otherwise the model is told that its outcome is unknown."
            )
        )
    if situation.run.status == Run.Status.PAUSED:
        effect.append(_("The pause ends."))
    if backs_off(situation.run):
        effect.append(_("The wait for the next attempt ends: the model is asked again at once."))
    effect.append(_("A worker takes the run up. Nothing runs inside this page."))
    return effect


def _why_not_resume(situation: Situation) -> str:
    run = situation.run
    if run.is_ended:
        return _("It has ended: %(status)s.") % {"status": run.get_status_display()}
    if situation.cancel_requested is not None:
        return _("It is being cancelled.")
    if run.status == Run.Status.AWAITING_APPROVAL:
        return _("It waits for a decision. Approve or deny, and it goes on by itself.")
    if is_live(run):
        return _("A worker is driving it, until %(when)s at least.") % {"when": exact(run.lease_expires_at)}
    return ""


def _about_workers(seen: datetime | None) -> list[str]:
    if seen is None:
        return [_("No worker has ever been seen here. Start one: manage.py resume_runs --watch")]
    if timezone.now() - seen > SILENT_AFTER:
        text = _("The last sweep of a worker was %(when)s. Is one running? manage.py resume_runs --watch")
        return [text % {"when": ago(seen)}]
    return []


def missing(permission: str) -> str:
    """Say that the user lacks a permission."""
    return _("You lack the permission %(permission)s.") % {"permission": permission}
