"""The buttons of a run or of several runs: whether each can be pressed now, and its execution.

Each button records what a person wants; workers carry it out. The template run_effects.html says what a
button would do in a situation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns.admin.base import ReadOnlyAdmin, mask_for
from agentruns.admin.forms import CancelForm, PauseForm, ResumeForm
from agentruns.admin.html import ago, bare, exact, plain, plain_line, reason
from agentruns.admin.runs.list import status, task_title
from agentruns.conf import settings
from agentruns.engine import budgets, drafts
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError, SessionBusyError
from agentruns.journal import policy, read, verify
from agentruns.models import Approval, Message, Run, event
from agentruns.services import permissions
from agentruns.services.runs import control, lifecycle, waiting, write
from agentruns.utils import clock, db, redaction

SILENT_AFTER = timedelta(minutes=5)
LIVE = "live"  # several running runs are stopped however far they have come since the page was shown
BUTTONS = ("resume", "pause", "cancel", "adopt", "raise_budget")
Line = dict[str, Any]  # one of several runs, with its situation or its outcome

logger = redaction.get_logger("agentruns.admin.runs.actions")


def is_silent(seen: datetime | None) -> bool:
    """Check whether no worker's sweep was seen lately; None was never seen."""
    return seen is None or clock.now(settings.DATABASE) - seen > SILENT_AFTER


@dataclass(frozen=True, slots=True)
class Action:
    """A button, and the reason why it cannot be pressed; `forbidden` if a permission is missing."""

    why_not: str = ""
    forbidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run's present state, and the buttons for which the user has the permission."""

    run: Run
    waits: list[waiting.Wait]
    cancel_requested: tuple[str, datetime] | None = None
    sweeper_seen: datetime | None = None
    uncleared: int = 0
    is_paused: bool = False
    approved: Sequence[str] = ()  # titles of the approved calls that a paused run does next
    pause_requested: tuple[str, datetime] | None = None
    may: Collection[str] = ()  # of BUTTONS
    definition: dict[str, Any] = field(default_factory=dict)
    drift: Any = None  # limits.Drift, on the page of a run that goes on

    @property
    def is_scheduled(self) -> bool:
        """Check whether the run waits for its scheduled start."""
        return any(wait.kind == waiting.SCHEDULED for wait in self.waits)

    @property
    def is_live(self) -> bool:
        """Check whether a worker is working on the run."""
        return waiting.is_live(self.run)

    @property
    def lacks_worker(self) -> bool:
        """Check whether the run needs a worker, and none was seen lately."""
        return self.run.status in drafts.AT_WORK and not self.is_live and is_silent(self.sweeper_seen)

    @property
    def waits_for_time(self) -> bool:
        """Check whether the run waits for its start time, or for the end of a back-off."""
        return waiting.waits_for_time(self.run)

    @property
    def is_ignored(self) -> bool:
        """Check whether a worker still works on the run a lease after the first request to cancel it."""
        asked, patience = self.cancel_requested, timedelta(seconds=settings.LEASE_SECONDS)
        return self.is_live and asked is not None and clock.now(settings.DATABASE) - asked[1] >= patience

    @property
    def orphans(self) -> list[waiting.Wait]:
        """List the calls in doubt that wait for a person."""
        return [wait for wait in self.waits if wait.kind == waiting.ORPHAN]


def situation(request: HttpRequest, run: Run) -> Situation:
    """Find the run's present state, and the buttons for which this user has the permission."""
    alias, user = settings.DATABASE, request.user
    paused, pause_requested = (False, None) if run.is_ended else waiting.pause_of(alias, run)
    mask, approved = mask_for(run), list[str]()
    if run.status == Run.Status.PAUSED:
        cards = Approval.objects.using(alias).filter(run_id=run.pk, status=Approval.Status.APPROVED)
        titles = cards.order_by("requested_at").values_list("tool_name", "title")
        approved = [plain(mask.tool_text(tool, title)) for tool, title in titles]
    return Situation(
        run=mask.run(run),
        waits=waiting.waits(alias, [run], {run.session_id: mask}).get(run.pk, []),
        cancel_requested=None if run.is_ended else waiting.cancel_requests(alias, [run]).get(run.pk),
        sweeper_seen=waiting.sweeper_seen(alias) if run.status in drafts.AT_WORK else None,
        is_paused=paused,
        approved=approved,
        pause_requested=pause_requested,
        may=[button for button in BUTTONS if permissions.may(user, button, run)],
    )


def is_exhausted(run: Run) -> bool:
    """Check whether the run is paused because one of its own budgets is used up."""
    kind, _, name = run.blocked_reason.partition(": ")
    return run.status == Run.Status.PAUSED and kind == budgets.EXHAUSTED and name.startswith(budgets.OF_A_RUN)


def headline(situation: Situation) -> str:
    """Describe in one sentence the run's state and who has to act."""
    run, count = situation.run, situation.uncleared
    if run.status == Run.Status.FAILED:
        return _("Failed: %(error)s") % {"error": plain_line(reason(bare(run.error)))}  # in full below
    if run.is_ended:
        text = _("%(status)s. It waits for nobody.")
        if count:
            text = ngettext(
                "%(status)s. Somebody still has to say what became of a call:",
                "%(status)s. Somebody still has to say what became of %(count)d calls:",
                count,
            )
        return text % {"status": capfirst(run.get_status_display()), "count": count}
    if situation.cancel_requested is not None:
        text = _("%(name)s asked %(when)s to cancel it. It ends before its next tool starts.")
        return text % request_of(situation.cancel_requested)
    if run.status == Run.Status.AWAITING_APPROVAL:
        return _("It waits for a person to decide:")
    if run.status == Run.Status.ORPHANED:
        return _("It waits for a person: nobody knows whether a call happened.")
    if run.status == Run.Status.WAITING:
        if all(wait.event == event.CHILD for wait in situation.waits):
            return _("It waits for another run, and goes on by itself when that run has ended:")
        return _("It waits for something outside, and goes on by itself when that happens:")
    if run.status == Run.Status.PAUSED:
        if is_exhausted(run):
            text = _("It is paused: a budget is used up. It goes on when somebody raises it.")
            return text if "raise_budget" in situation.may else f"{text} {missing('raise_budget')}"
        return _("It is paused, and goes on when somebody resumes it.")
    if situation.pause_requested is not None and situation.is_live:
        text = _("%(name)s asked %(when)s to pause it. It pauses before its next tool starts.")
        return text % request_of(situation.pause_requested)
    if run.status == Run.Status.RUNNING:
        return _("A worker is working on it.") if situation.is_live else _("Its worker has fallen silent.")
    if situation.is_scheduled:
        return _("It starts at %(time)s.") % {"time": exact(run.not_before)}
    if turn := next((wait.text for wait in situation.waits if wait.kind == waiting.IN_TURN), ""):
        return plain(turn)
    if situation.waits_for_time:
        return _("It waits a while, because its model failed.")
    is_other = situation.drift is not None and situation.drift.is_other
    if is_other or any(wait.kind == waiting.BLOCKED for wait in situation.waits):
        return _("It is queued, but cannot go on here as it is.")
    return _("It is queued: the next free worker takes it.")


def resume(situation: Situation) -> Action:
    """Find the reason why Resume is not possible."""
    run = situation.run
    is_next = run.status == Run.Status.QUEUED and not situation.waits_for_time and "resume" in situation.may
    return action(
        situation,
        "resume",
        over(situation),
        run.status == Run.Status.AWAITING_APPROVAL
        and _("It waits for a decision. Approve or deny, and it goes on by itself."),
        run.status == Run.Status.WAITING
        and _("It waits for an event. Deliver the event or stop waiting, and it goes on by itself."),
        situation.is_live
        and _("A worker is working on it, until %(when)s at least.") % {"when": exact(run.lease_expires_at)},
        is_next and headline(situation),
    )


def pause(situation: Situation) -> Action:
    """Find the reason why Pause is not possible."""
    is_asked = situation.pause_requested is not None and situation.is_live
    paused, asked = _("It is paused already."), _("It is being paused.")
    return action(situation, "pause", over(situation), situation.is_paused and paused, is_asked and asked)


def cancel(situation: Situation) -> Action:
    """Find the reason why Cancel is not possible: the run has ended, or its worker may still react."""
    may_react = situation.is_live and not situation.is_ignored
    return action(situation, "cancel", (situation.run.is_ended or may_react) and over(situation))


def action(situation: Situation, button: str, *reasons: str | bool | None) -> Action:
    """Describe a button, and why it is disabled if it is.

    The reason is the first text in `reasons` that is not empty; others are skipped. If there is no such text,
    the reason is the permission that the user lacks, if any.
    """
    why_not = next((each for each in reasons if isinstance(each, str) and each), "")
    forbidden = not why_not and button not in situation.may
    return Action(missing(button) if forbidden else why_not, forbidden)


def request_of(request: tuple[str, datetime]) -> dict[str, str]:
    """Format the name and the time of a request to cancel or to pause."""
    name, when = request
    return {"name": plain(name or _("the program")), "when": ago(when)}


def buttons(situation: Situation) -> dict[str, Any]:
    """Describe the buttons Resume, Pause and Cancel of a run, and build the form of each."""
    actions: dict[str, Any] = {name: verb.advice(situation) for name, verb in VERBS.items()}
    seen = {} if actions["resume"].why_not else {"seq": str(last_seq(situation.run))}
    forms = {f"{name}_form": verb.form(initial=seen, auto_id=f"{name}_%s") for name, verb in VERBS.items()}
    return {"situation": situation, **actions, **forms}


def over(situation: Situation) -> str:
    """Explain that nothing can be done, because the run has ended or is being cancelled; otherwise ""."""
    if situation.run.is_ended:
        return _("It has ended: %(status)s.") % {"status": situation.run.get_status_display()}
    return _("It is being cancelled.") if situation.cancel_requested is not None else ""


def missing(what: str) -> str:
    """Explain that the user lacks the permission for `what`, which is an action in `policy.ACTIONS`."""
    return _("You lack the permission %(permission)s.") % {"permission": policy.ACTIONS[what][0]}


def last_seq(run: Run) -> int:
    """Find the seq of a run's last row, 0 if it has none."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    return rows.order_by("-seq").values_list("seq", flat=True).first() or 0


def press_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, verb: str) -> HttpResponse:
    """Resume, pause or cancel a run; refuse to resume a run that has changed since the page showed it."""
    button = VERBS[verb]

    def do(run: Run) -> str:
        form = button.form(request.POST)
        if not form.is_valid() and "reason" in form.errors:
            raise RunStateError(" ".join(map(str, form.errors["reason"])))
        if not button.stops:
            require_last_row(run, form.cleaned_data.get("seq"))
        if verb != "cancel":  # a cancel may be requested repeatedly
            require(button.advice(situation(request, run)))
        return act(verb, run, request.user, form.cleaned_data.get("reason", ""))

    return press(admin, request, run, do, str(button.logged))


def act(verb: str, run: Run, user: Any, reason: str) -> str:
    """Resume, pause or cancel a run, request this from its worker, or adopt; describe the effect."""
    if verb == "resume":
        lifecycle.resume_run(run.pk, user, drive=False)
        return _("Resumed. A worker picks it up.")
    if verb == "pause":
        if waiting.is_live(control.pause_run(run.pk, user, reason=reason)):
            return _("Pause requested. The worker pauses it before its next tool starts.")
        return _("Paused. It goes on when somebody resumes it.")
    if verb == "adopt":
        run = control.adopt_definition(run.pk, user, reason=reason)
        return _("Adopted. The run now follows the definition of version %s.") % run.version
    if control.cancel_run(run.pk, user, reason=reason).is_ended:
        return _("Cancelled.")
    return _("Cancel requested. The worker stops before its next tool starts.")


def press(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, do: Callable[[Run], str], logged: str
) -> HttpResponse:
    """Lock the session and call `do`; log `logged`, show the text that `do` returned, and redirect.

    Raises the errors of `do`, and RunStateError if the journal of the session is damaged.
    """

    def pressed() -> str:
        write.lock_session(settings.DATABASE, run.session_id)
        return do(write.find_run(run.pk))

    try:
        done = db.in_transaction(settings.DATABASE, pressed)
    except read.UNREADABLE as error:
        if not verify.check(run.session_id, settings.DATABASE):
            raise
        raise RunStateError(_("The journal of its session is damaged.")) from error
    return admin.done(request, run, logged, done)


def require(action: Action) -> None:
    """Raise PermissionDeniedError or RunStateError if a button cannot be pressed."""
    if action.forbidden:
        raise PermissionDeniedError(action.why_not)
    if action.why_not:
        raise RunStateError(action.why_not)


def require_last_row(run: Run, seen: int | None) -> None:
    """Raise RunStateError unless the run's last row is the one that the page showed."""
    if seen != last_seq(run):
        raise RunStateError(_("The run moved on since you looked. This is how it is now."))


def act_on_selected(
    admin: ReadOnlyAdmin, request: HttpRequest, name: str, runs: list[Run], verb: Verb | None = None
) -> HttpResponse:
    """Show the page that asks for confirmation; after it, act on each run and show each outcome."""
    verb, lines = verb or VERBS[name], list[Line]()
    kind = CancelForm if "reason" in verb.form.base_fields else Form
    form = kind(request.POST if "confirmed" in request.POST else None)
    is_confirmed = form.is_valid()
    if is_confirmed:
        reason = form.cleaned_data.get("reason", "")
        # Sessions in one order for everybody: two bulk actions (ATOMIC_REQUESTS) never wait for each other.
        in_order = sorted(runs, key=lambda run: run.session_id)
        outcomes = {run.pk: act_on(admin, request, name, run, reason, verb) for run in in_order}
        lines = [outcomes[run.pk] for run in runs]
    else:
        for run in runs:
            now = verb.look(request, run)
            seen = LIVE if verb.stops and now.is_live else f"{run.session.next_seq - 1}{verb.mark(now)}"
            lines.append({"run": run, "situation": now, "why_not": verb.advice(now).why_not, "seen": seen})
    count = sum(not line.get("why_not") for line in lines)
    return admin.render(
        request,
        None,
        title=_("Outcome of each") if is_confirmed else str(verb.title),
        status=400 if form.is_bound and not is_confirmed else 200,
        template="run_bulk",
        verb=name,
        lines=[{**line, "title": task_title(line["run"]), "badge": status(line["run"])} for line in lines],
        form=None if is_confirmed else form,
        outcome=is_confirmed,
        count=count,
        left_out=len(lines) - count,
    )


def act_on(admin: ReadOnlyAdmin, request: HttpRequest, name: str, run: Run, reason: str, verb: Verb) -> Line:
    """Act on one run, and describe the outcome. A refusal does not stop the actions on other runs."""
    seen = request.POST.get(f"seen-{run.pk}", "")
    if not seen:  # was left out when the person looked
        why_not = verb.advice(verb.look(request, run)).why_not
        return {"run": run, "why_not": why_not or _("It was not on the page.")}
    rows = admin.get_queryset(request).filter(pk=run.pk)

    def press_shown() -> str:
        write.lock_session(settings.DATABASE, run.session_id)
        now = rows.first() or run  # a run that is gone stays as it was, so that a service refuses it
        looked = verb.look(request, now)
        # Only this unfinished run can add rows to its session.
        if seen != f"{now.session.next_seq - 1}{verb.mark(looked)}" and not (verb.stops and seen == LIVE):
            raise RunStateError(_("It moved on since you looked. Look at it again."))
        require(verb.advice(looked))
        return act(name, now, request.user, reason)

    try:
        line = {"done": db.in_transaction(settings.DATABASE, press_shown)}
    except AgentRunsError as error:
        is_refused = not isinstance(error, RunStateError | SessionBusyError)
        return {"run": rows.first() or run, "why_not": plain(error), "refused": is_refused}
    except DatabaseError:
        logger.exception("Bulk %s failed run=%s", name, run.pk)
        why = _("The database failed; the log says how. Nothing was changed about this run.")
        return {"run": run, "why_not": why, "refused": True}
    admin.log_change(request, run, f"{verb.logged} {plain(reason)}".strip())
    return {"run": rows.first() or run, **line}


@dataclass(frozen=True, slots=True)
class Verb:
    """A button for one run or several; only a button that `stops` may act on runs that changed since."""

    form: type[Form]
    advice: Callable[[Situation], Action]
    logged: Any
    title: Any  # of the page for several
    stops: bool = False
    look: Callable[[HttpRequest, Run], Situation] = situation
    mark: Callable[[Situation], str] = lambda now: ""  # what else than the last row a person must have seen


VERBS = {
    "resume": Verb(
        ResumeForm, resume, gettext_lazy("Resumed from the console."), gettext_lazy("Resume these runs?")
    ),
    "pause": Verb(
        PauseForm,
        pause,
        gettext_lazy("Pause requested in the console."),
        gettext_lazy("Pause these runs?"),
        stops=True,
    ),
    "cancel": Verb(
        CancelForm,
        cancel,
        gettext_lazy("Cancel requested in the console."),
        gettext_lazy("Cancel these runs?"),
        stops=True,
    ),
}
