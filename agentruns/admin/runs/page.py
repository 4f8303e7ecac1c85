"""The page of a run: its state and the reasons for it, its journal, its review, and its live updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, QueryDict
from django.template.loader import render_to_string
from django.utils.crypto import salted_hmac
from django.utils.html import format_html
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import READING, ReadOnlyAdmin, mask_for, page_url, status_of
from agentruns.admin.forms import MomentField, reason_field
from agentruns.admin.html import bare, body, duration, exact, plain
from agentruns.admin.runs import actions, chat, events, steps
from agentruns.admin.runs.list import cost, counts, task_title, wait_url, words
from agentruns.conf import settings
from agentruns.engine import drafts
from agentruns.exceptions import AgentRunsError
from agentruns.journal import outsiders, policy, read, verify
from agentruns.journal.events import Row
from agentruns.models import Approval, Message, Review, Run
from agentruns.services import permissions, reviews
from agentruns.services.runs import starting, waiting
from agentruns.services.runs.waiting import is_live
from agentruns.utils import bounds, json as canonical

PAGE = 100  # journal rows
BEFORE = 20  # rows before a page that its first steps are timed from
EARLIER = 4  # runs of the session that the page names
STEADY = 10  # first characters of a tag, which do not depend on the words of a reply
KEPT = ("rows", "plain", "whole")  # parameters of the page that its links keep
REFUSED = gettext_lazy("Its provider refuses the conversation. It goes on without the part that is left out.")
FILTERS = "_changelist_filters"  # Django's: those of the list that the user came from


@dataclass(frozen=True, slots=True)
class Rows:
    """A page of the journal; `earlier`, `later` and `latest` are the `after` of other pages, or None."""

    rows: list[Row]
    earlier: int | None
    later: int | None
    latest: int | None


class ReviewForm(forms.Form):
    """The form of a whole review; `seen` is the time of the last change to the review that was shown."""

    seen = MomentField(required=False, widget=forms.HiddenInput)
    rating = forms.TypedChoiceField(
        label=gettext_lazy("Rating"), coerce=int, choices=Review.Rating.choices, widget=forms.RadioSelect
    )
    assignee = forms.CharField(
        label=gettext_lazy("Assigned to (username)"),
        required=False,
        max_length=bounds.NAME_LENGTH,
        widget=forms.TextInput({"list": "ar-people", "autocomplete": "off"}),
    )
    note = reason_field(gettext_lazy("Note, for colleagues; the agent never reads it"), required=False)


def overview(admin: ReadOnlyAdmin, request: HttpRequest, situation: actions.Situation) -> dict[str, Any]:
    """Build the context of the run's state, its buttons, its conversation and its steps."""
    run, mask, alias = situation.run, mask_for(situation.run), settings.DATABASE
    uncleared = waiting.uncleared(alias, run, mask, policy.visible_runs(request.user))
    situation = replace(situation, uncleared=len(uncleared))
    waits, doubts = (
        [(words(wait), wait_url(admin, request, wait), wait.kind) for wait in waits]
        for waits in ([wait for wait in situation.waits if wait.kind != waiting.EVENT], uncleared)
    )
    after, is_live = seq_of(request.GET.get("after", "")), "seen" in request.GET
    rows = journal_rows(alias, run.pk, after)
    # An open page polls for the rows after its last row; its conversation shows the latest rows.
    spoken = journal_rows(alias, run.pk, None) if is_live and after is not None else rows
    whole, is_plain = seq_of(request.GET.get("whole", "")), "plain" in request.GET
    times = _timings(run, rows)
    spoken_times = times if spoken is rows else _timings(run, spoken)
    talk = chat.Talk(run, mask, spoken_times, whole=whole, is_plain=is_plain)
    talk.add(spoken.rows)
    before = admin.get_queryset(request).filter(session_id=run.session_id, pk__lt=run.pk).order_by("-id")
    earlier = list(before.defer("input", "output", "error")[:EARLIER])
    for other in earlier:
        other.mask = mask
    cards = []
    for card in (steps.row_card(mask.row(row)) for row in rows.rows):
        card.timing = times.get(int(card.seq))
        if run.session.imported_at:
            card.who = format_html("{}{}", card.who, verify.MARK)
        card.call_url = admin.url(request, "call", run.pk, card.call) if card.call else ""
        cards.append((card, admin.other_page(request, Approval, card.approval) if card.approval else ""))
    is_refused = waiting.is_refused(alias, run)
    is_full = request.GET.get("rows") == "full"
    starts = chat.repeated(request.user, run)
    is_stopped = run.status in (Run.Status.FAILED, Run.Status.CANCELLED)
    return {
        **about(run),
        "stalled": waiting.is_stalled(run),
        "headline": REFUSED if is_refused else actions.headline(situation),
        "took": duration(run.updated_at - run.created_at) if run.is_ended else "",
        "cost": cost(run.usage),
        "starts": starts,
        "elsewhere": chat.elsewhere(request.user, starts.approvals, mask),
        "reasons": waits,
        "uncleared": doubts,
        "may_resolve": permissions.may(request.user, "resolve", run),
        "may_leave_out": is_refused and "resume" in situation.may,
        "doubt_url": next((url for _text, url, kind in waits if kind == waiting.ORPHAN), ""),
        **actions.buttons(situation),
        **events.awaited(request, run),
        "is_stopped": is_stopped,
        "may_start": is_stopped and run.agent in {agent.name for agent in starting.agents_of(request.user)},
        "session_url": page_url(admin.admin_site, Run, session=run.session_id),
        "earlier": [(other, task_title(other)) for other in reversed(earlier)],
        "turns": talk.turns,
        "query": query_of(request, FILTERS, *KEPT, *([] if is_live else ["after"])),
        "whole": whole,
        "is_plain": is_plain,
        "has_markdown": any(turn.text is not None and turn.text.kind == "markdown" for turn in talk.turns),
        "lines": [line for line in talk.lines.values() if line.started and line.is_effect],
        "task": body("", run.input, chat.LONGEST) if spoken.earlier is not None else None,
        "is_latest": is_live or rows.later is None,
        "talk": spoken,
        "reply_form": chat.reply_form(request.user, run),
        "journal": rows,
        "is_full": is_full,
        "steps_open": is_full or after is not None,
        "last_shown": rows.rows[-1].seq if rows.rows else 0,
        "cards": cards,
    }


def about(run: Run) -> dict[str, Any]:
    """Build the context of a run's facts, and of its input, output and error in full."""
    expires, worker, heard = run.lease_expires_at, _("none"), None
    if expires:
        worker = _("%(owner)s until %(when)s") if is_live(run) else _("%(owner)s, silent since %(when)s")
        worker %= {"owner": run.lease_owner[:8], "when": exact(expires)}
        heard = expires - timedelta(seconds=settings.LEASE_SECONDS)  # it is extended for a fixed time
    texts = ((_("Input"), run.input), (_("Output"), run.output), (_("Error"), run.error))
    bodies = [body(label, text) for label, text in texts if text]
    facts = {"run": run, "worker": worker, "heard": heard, "used": counts(run.usage), "bodies": bodies}
    return {**facts, "readers": [plain(tool) for tool in outsiders.read_by(settings.DATABASE, run)]}


def live_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Render the run's page for an open page, without the site around it.

    Status 204 if nothing changed since `seen`. If only the reply being written is new, renders just its
    words.
    """
    if request.method not in READING:
        return HttpResponseNotAllowed(READING)
    now, seen = live(admin, request, run), request.GET.get("seen", "")
    if seen == now["tag"]:
        return HttpResponse(status=204)
    if seen[:STEADY] == now["tag"][:STEADY]:
        context = {"live": now, "journal": {"later": None}, "last_shown": request.GET.get("after", "")}
        return HttpResponse(render_to_string("agentruns/admin/run_words.html", context, request))
    return admin.page(request, run, base="agentruns/admin/fragment.html", live=now)


def watch_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Ask the worker of a queued or running run to store drafts for a while; an open page repeats this."""
    if run.status in drafts.AT_WORK:
        drafts.watch([run.pk])
    return HttpResponse(status=204)


def live(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> dict[str, Any]:
    """Build the data that an open page polls; an unchanged `tag` means that nothing is new."""
    state = [run.status, run.blocked_reason, run.attempts, is_live(run), waiting.waits_for_time(run)]
    draft, tag = drafts.draft_of(run), ""
    for part, length in (([str(run.pk), actions.last_seq(run), *state], STEADY), (draft, 6)):
        # Keyed, because the reason of a blocked run may hold values that are redacted.
        tag += salted_hmac("agentruns.tag", canonical.dumps(part), algorithm="sha256").hexdigest()[:length]
    return {
        "url": admin.url(request, "live", run.pk, **query_of(request, *KEPT).dict()),
        "watch": admin.url(request, "watch", run.pk),
        "page": admin.url(request, "change", run.pk),
        "tag": tag,
        "status": run.status,
        "is_ended": run.is_ended,
        "interval": str(admin.live_interval),
        "draft": body("", draft).text if draft else "",
    }


def query_of(request: HttpRequest, *names: str) -> QueryDict:
    """Copy the named parameters of the page's URL."""
    query = QueryDict(mutable=True)
    query.update({name: request.GET[name] for name in names if name in request.GET})
    return query


def journal_rows(alias: str, run_id: UUID, after: int | None, size: int = PAGE) -> Rows:
    """Read the page of rows after the seq `after`; if `after` is None, the latest page.

    A page has `size` rows. The latest page may have a tenth more.
    """
    seqs = Message.objects.using(alias).filter(run_id=run_id)
    most = size + size // 10  # avoids a further page with only a few rows
    latest = start_of_last(seqs, size, most) or 0
    if after is None:
        after = latest
    rows = read.run_rows(alias, run_id, after, most + 1)
    more = len(rows) > most
    rows = rows[:size] if more else rows
    before = seqs.filter(seq__lt=rows[0].seq if rows else after + 1)
    earlier = start_of_last(before, size, size) if after > 0 else None
    return Rows(rows, earlier, later=rows[-1].seq if more else None, latest=latest if more else None)


def seq_of(text: str) -> int | None:
    """Parse the seq in a URL; None if the seq is missing or impossible."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def start_of_last(rows: QuerySet[Message], size: int, most: int) -> int | None:
    """Find the seq after which the last `size` rows begin.

    Returns 0 if there are no more than `most` rows, None if there is no row.
    """
    seqs = list(rows.order_by("-seq").values_list("seq", flat=True)[: most + 1])
    return seqs[size - 1] - 1 if len(seqs) > most else 0 if seqs else None


def _timings(run: Run, rows: Rows) -> dict[int, steps.Timing]:
    earlier: list[Row] = []
    if rows.rows and rows.earlier is not None:  # a step that ends here may have begun on the page before
        seqs = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq__lt=rows.rows[0].seq)
        earlier = read.read_rows(seqs.order_by("-seq")[:BEFORE])[::-1]
    return steps.timings([*earlier, *rows.rows])


def review(admin: ReadOnlyAdmin, request: HttpRequest, situation: actions.Situation) -> dict[str, Any]:
    """Build the context of a run's review, with the form if the user may change it."""
    run = situation.run
    review: Any = getattr(run, "review", None)
    note = mask_for(run).json(review.note) if review else ""
    context = {"review": review, "review_note": note}
    if not permissions.may(request.user, "review", run):
        return context
    initial: dict[str, Any] = {"note": bare(note), "rating": Review.Rating.NONE}
    if review:
        initial |= {"rating": review.rating, "assignee": bare(review.assignee_name)}
        initial |= {"seen": review.updated_at.isoformat()}
    form, thumbs = (ReviewForm(initial=initial, auto_id=auto_id) for auto_id in ("review_%s", ""))
    names = reviews.assignable(request.user, run)
    people = [name for name in names if bare(name) == name]  # others would come back changed
    return {**context, "review_form": form, "thumbs": thumbs, "people": people}


def review_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Store the review that was sent; if it is refused, show the page again with the reason."""
    form = ReviewForm(request.POST, auto_id="review_%s")
    status, refusal = 400, _("Nothing was saved. Correct the review below.")
    if form.is_valid():
        given, before = {**form.cleaned_data}, getattr(run, "review", None) or Review()
        if given["note"] == bare(mask_for(run).json(before.note)):  # unchanged: keep its hidden parts
            given["note"] = before.note
        if given["assignee"] == bare(before.assignee_name):
            given["assignee"] = before.assignee_name
        try:
            reviews.review_run(run.pk, request.user, **given)
        except (AgentRunsError, ValueError) as error:
            if not isinstance(error, AgentRunsError):  # the form has checked all other fields
                form.add_error("assignee", plain(error))
            status, refusal = status_of(error), plain(error)
        else:
            return admin.done(request, run, _("Reviewed."), _("The review is saved."))
    sent = {"review_form": form} if permissions.may(request.user, "review", run) else {}
    return admin.page(request, run, status=status, refusal=refusal, **sent)
