"""Decisions on one approval on its card, or on several on one page: selected ones, or all of one reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.crypto import salted_hmac
from django.utils.formats import get_format, number_format
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin.approvals.card import ApprovalCard, asked, cards_of
from agentruns.admin.approvals.texts import unit_in
from agentruns.admin.approvals.verbs import decide, done, form_of, outcome
from agentruns.admin.base import CHANNEL, ReadOnlyAdmin, following, is_uuid, status_of, ticked
from agentruns.admin.filters import HEAVY, QUEUED, URGENT_FIRST
from agentruns.admin.forms import NoteForm
from agentruns.admin.html import named, person, plain, plain_line, risk_badge, visible
from agentruns.admin.runs.steps import mask_for
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, ApprovalStateError, PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.deciders import why_not_decide
from agentruns.models import Approval, Message, Run
from agentruns.models.querysets import PENDING
from agentruns.services import permissions
from agentruns.services.approvals import extend
from agentruns.tools import to_jsonable
from agentruns.utils import json as canonical

VERBS = ("approve", "deny")  # of a page for several
TITLES = {"approve": gettext_lazy("Approve these calls?"), "deny": gettext_lazy("Deny these calls?")}
WARNED_SALT = "agentruns.admin.approvals.warned"
WARNED = gettext_lazy(
    "Nothing was decided yet. With these arguments the tool's preview warns:{}"
    " If you mean it, approve with these arguments again."
)
# The statuses of an approval after each verb, with those that follow automatically.
STATUSES = {
    "approve": ("approved", "consumed"),
    "edit": ("approved", "consumed"),
    "answer": ("answered",),
    "deny": ("denied",),
}
Line = dict[str, Any]  # one approval of a page for several, before or after its decision


def decide_view(admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, verb: str) -> HttpResponse:
    """Record a person's decision on the shown approval; a worker executes it."""
    form: Any
    revealed = False
    if verb == "edit":
        revealed = "revealed" in request.POST and permissions.may_reveal(request.user, approval)
        [card] = cards_of(request.user, [approval], revealed=revealed)
        form = card.edit_form(request.POST)
    else:
        form = form_of(verb, approval, request.POST)
    if form is None:
        error = ApprovalStateError(_("It cannot be edited here."))
        return _refused(admin, request, approval, error)
    name = "decide" if verb in ("approve", "deny") else verb
    sent: dict[str, Any] = {f"{name}_form": form, "denying": verb == "deny"}
    if not form.is_valid():
        text = _("Nothing was decided. Correct the form below.")
        if verb == "deny" and not request.POST.get("reason", "").strip():
            text = _("Nothing was decided yet. Say why, and press Deny again.")
        return admin.page(request, approval, status=400, revealed=revealed, refusal=text, **sent)
    may = verb == "edit" and card.pending and not why_not_decide(request.user, approval, verb="edit")
    if may and (warnings := card.warned_of(form.arguments)):  # `preview` is called for deciders only
        seen = [str(approval.pk), str(request.user.pk), to_jsonable(form.arguments)[0], *map(str, warnings)]
        # Keyed, so that nobody can guess hidden arguments from it.
        mark = salted_hmac(WARNED_SALT, canonical.dumps(seen), algorithm="sha256").hexdigest()
        if request.POST.get("warned") != mark:
            text = format_html(str(WARNED), format_html_join("", " {}.", ((each,) for each in warnings)))
            sent["warned"] = mark
            return admin.page(request, approval, status=400, revealed=revealed, refusal=text, **sent)
    if verb in ("approve", "edit") and (why := _no_password(request, [approval])):
        return admin.page(request, approval, status=403, revealed=revealed, refusal=why, **sent)
    waiting = queue(admin, request)  # before it is decided: afterwards it has no place in the queue
    given, user = form.cleaned_data, request.user
    try:
        if verb == "extend":
            by, seen_end = timedelta(hours=given["hours"]), given["seen"]
            approval = extend(approval.pk, user, by, digest=given["digest"], seen=seen_end, channel=CHANNEL)
        else:
            text = given["text" if verb == "answer" else "reason"]
            edited = form.arguments if verb == "edit" else None
            approval = decide(approval, user, verb, given["digest"], text, edited)
    except PermissionDeniedError as error:
        return _refused(admin, request, approval, error)
    except AgentRunsError as error:
        again = admin.find(request, approval.pk)
        if _was_mine(again, verb, user, form):  # a double click
            admin.message_user(request, outcome(again), messages.INFO)
            return admin.back(request, again)
        return _refused(admin, request, approval, error, revealed=revealed, **sent)
    logged: dict[str, str] = {
        "approve": _("Approved."),
        "edit": _("Approved with edited arguments."),
        "answer": _("Answered: %s") % plain(given.get("text", "")),
        "deny": _("Denied: %s") % plain(given.get("reason", "")),
        "extend": _("Extended by %s h.") % given.get("hours", ""),
    }
    admin.log_change(request, approval, logged[verb])
    _tell(admin, request, approval, done(approval, verb))
    return admin.back(request, approval) if verb == "extend" else _onward(admin, request, approval, waiting)


def _was_mine(approval: Approval, verb: str, user: Any, form: Any) -> bool:
    """Check whether the recorded decision is the same one that `user` sends again."""
    if approval.decided_by_id != user.pk or approval.status not in STATUSES.get(verb, ()):
        return False
    rows = Message.objects.using(settings.DATABASE).filter(
        run_id=approval.run_id, call_id=approval.call_id, kind=events.APPROVAL_DECIDED
    )
    stands, sent = rows.latest("seq").payload, form.cleaned_data
    if verb == "edit":
        return bool(stands.get("edited") == to_jsonable(form.arguments)[0])
    if verb == "answer":
        return bool(stands.get("text") == sent["text"])
    same_reason = stands.get("reason", "") == sent["reason"]
    return same_reason and "arguments" not in stands and approval.digest == sent["digest"]


def _refused(
    admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, error: AgentRunsError, **context: Any
) -> HttpResponse:
    approval, status = admin.find(request, approval.pk), status_of(error)
    why, pending = plain(error), approval.status == Approval.Status.PENDING
    if status == 409 and not pending:
        why = outcome(approval)
    elif status == 409 and approval.digest != request.POST.get("digest"):
        why = _("Its arguments were edited since you looked. This is what it asks now.")
        context = {}
    text = _("Your decision was not recorded. %(why)s") % {"why": why}
    return admin.page(request, approval, status=status, refusal=text, **(context if pending else {}))


def _no_password(request: HttpRequest, approvals: Iterable[Approval]) -> str:
    """Explain why approving needs the user's password with the request; "" if it has it or needs none."""
    if not any(permissions.needs_password(request, approval) for approval in approvals):
        return ""
    password = request.POST.get("password", "")
    if not password:
        return _("Nothing was decided. The risk is high: give your password, too.")
    if not permissions.confirm_password(request, password):
        return _("Nothing was decided. That is not your password.")
    return ""


def queue(admin: ReadOnlyAdmin, request: HttpRequest) -> list[UUID]:
    """List the pending cards of the list that this user came from, in its order."""
    query = QueryDict(request.GET.get("_changelist_filters", ""), mutable=True)
    query.pop("p", None)  # the cards of all pages
    listed = admin.get_queryset(request).order_by(*URGENT_FIRST)
    if query:  # without filters the plain order suffices, which is cheaper
        with suppress(IncorrectLookupParameters):  # not from a list of ours
            listed = admin.listing(request, query).queryset
    return list(listed.filter(status=PENDING).values_list("pk", flat=True)[:QUEUED])


def _onward(
    admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, queue: list[UUID]
) -> HttpResponse:
    """Open the next card of a queue that this user can decide, or the list if there is none."""
    keys = following(queue, approval.pk)
    pending = Approval.objects.using(approval._state.db).pending().select_related("run")
    waiting = pending.filter(pk__in=keys).defer(*HEAVY).in_bulk()
    left = [waiting[key] for key in keys if key in waiting]
    for one in permissions.decidable(request.user, left):
        return HttpResponseRedirect(admin.url(request, "change", one.pk))
    admin.message_user(request, _("Nothing else waits for you."), messages.INFO)
    return HttpResponseRedirect(admin.url(request, "changelist"))


def _tell(
    admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, text: str, level: int = messages.SUCCESS
) -> None:
    """Show the outcome of an approval as a message, with a link to it."""
    url, title = admin.url(request, "change", approval.pk), mask_for(approval.run).approval(approval).title
    admin.message_user(request, format_html('{} <a href="{}">{}</a>', text, url, visible(title)), level)


def decide_selected(
    admin: ReadOnlyAdmin, request: HttpRequest, verb: str, approvals: list[Approval]
) -> HttpResponse:
    """Ask for confirmation, then decide the approvals that were on the page, even for "select all"."""
    is_confirmed = "confirmed" in request.POST
    refused = _incomplete(request, verb, approvals, (verb,)) if is_confirmed else {}
    if refused or not is_confirmed:
        return _ask(admin, request, approvals, (verb,), title=str(TITLES[verb]), **refused)
    lines = _decide(admin, request, verb, approvals)
    return _show(admin, request, lines, title=_("Outcome of each"), outcome=True)


def turn_view(admin: ReadOnlyAdmin, request: HttpRequest, run_id: str) -> HttpResponse:
    """Show the calls of a run that wait; decide each ticked call by itself."""
    if not admin.has_view_permission(request):
        raise PermissionDenied
    if not is_uuid(run_id):
        raise Http404(_("There is no run %(id)s.") % {"id": plain(run_id)})
    rows = admin.get_queryset(request).filter(run_id=run_id).order_by("requested_at", "id")
    waiting, refused = list(rows.filter(status=PENDING)), dict[str, Any]()
    verb, chosen = request.POST.get("verb", ""), ticked(request, rows)
    if request.method == "POST" and verb in VERBS and chosen:
        refused = _incomplete(request, verb, chosen, VERBS)
        if not refused:
            others = queue(admin, request)  # before they are decided: afterwards they have no place in it
            for line in _decide(admin, request, verb, chosen):
                lost = _("Your decision was not recorded. %(why)s") % {"why": line["why_not"]}
                level = messages.SUCCESS if line["done"] else messages.WARNING
                _tell(admin, request, line["approval"], line["done"] or lost, level)
            if admin.get_queryset(request).filter(run_id=run_id, status=PENDING).exists():
                return HttpResponseRedirect(admin.url(request, "turn", run_id))
            return _onward(admin, request, chosen[-1], others)
    elif request.method == "POST":
        refused = {"status": 400, "refusal": _("Nothing was decided: tick at least one call.")}
    if not waiting:
        admin.message_user(request, _("Nothing of this run waits for a decision."), messages.INFO)
        return HttpResponseRedirect(admin.url(request, "changelist"))
    run = waiting[0].run
    title = ngettext("%(agent)s asks for a decision", "%(agent)s asks for %(count)d decisions", len(waiting))
    title %= {"agent": plain(run.agent), "count": len(waiting)}
    run_url = admin.other_page(request, Run, run.pk)
    return _ask(admin, request, waiting, VERBS, title=title, run_url=run_url, is_turn=True, **refused)


def _incomplete(
    request: HttpRequest, verb: str, approvals: list[Approval], verbs: Sequence[str]
) -> dict[str, Any]:
    """Explain for the page why nothing is decided; {} if the request has all that the verb needs."""
    form = NoteForm(request.POST, needs=verb == "deny", verbs=verbs)
    if not form.is_valid():
        return {"form": form, "status": 400, "refusal": _("Nothing was decided. Correct the form below.")}
    why = _no_password(request, approvals) if verb == "approve" else ""
    return {"form": form, "status": 403, "refusal": why} if why else {}


def _decide(admin: ReadOnlyAdmin, request: HttpRequest, verb: str, approvals: list[Approval]) -> list[Line]:
    """Decide each approval; a refusal of one stops no other."""
    reason, lines = NoteForm(request.POST)["reason"].value() or "", dict[UUID, Line]()
    # Sessions in one order for everybody: two bulk decisions in transactions never wait for each other.
    for card in sorted(cards_of(request.user, approvals), key=lambda card: card.approval.run.session_id):
        approval, digest = card.approval, request.POST.get(f"digest-{card.approval.pk}")
        if digest is None:  # was skipped when the person looked
            said = {"why_not": _why_not(card, verb) or _("It was not on the page.")}
        else:
            try:
                approval = decide(approval, request.user, verb, digest, reason.strip())
            except AgentRunsError as error:
                said = {"why_not": outcome(admin.find(request, approval.pk)) or plain(error)}
            else:
                logged = _("Approved in bulk.") if verb == "approve" else _("Denied: %s") % plain(reason)
                admin.log_change(request, approval, logged)
                said = {"done": done(approval, verb)}
        lines[approval.pk] = _line(admin, request, card, **said)
    return [lines[approval.pk] for approval in approvals]


def _why_not(one: ApprovalCard, verb: str) -> str:
    """Explain why this user cannot take this decision on the card; "" if they can."""
    if not one.pending:
        return outcome(one.approval)
    if verb == "approve" and one.only_answers:
        return _("A question is answered, not approved.")
    return one.why_not or (one.why_not_approve if verb == "approve" else "")


def _ask(
    admin: ReadOnlyAdmin,
    request: HttpRequest,
    approvals: list[Approval],
    verbs: Sequence[str],
    **context: Any,
) -> HttpResponse:
    """Show the approvals to decide, and the possible verbs."""
    is_list = "is_turn" not in context and "confirmed" not in request.POST  # the list's ticks only select
    ticked = [] if is_list else request.POST.getlist(ACTION_CHECKBOX_NAME)
    cards, lines = cards_of(request.user, approvals), []
    for one in cards:
        whys = [_why_not(one, verb) for verb in verbs]
        line = _line(admin, request, one, why_not=whys[0] if all(whys) else "", hint=whys[0])
        is_warned = "approve" in verbs and any(flag.tone == "bad" for flag in line.get("flags", ()))
        line["ticked"] = not any(whys) and (line["key"] in ticked if ticked else not is_warned)
        lines.append(line)
    total = _total([one for one, line in zip(cards, lines, strict=True) if not line["why_not"]])
    numbers = total.pop("numbers", {})
    for one, line in zip(cards, lines, strict=True):
        line["number"] = numbers.get(one.approval.pk, "")
    shown = {
        "form": NoteForm(verbs=verbs),
        "verbs": verbs,
        "total": total,
        "quotes": [cards[0].request, cards[0].said] if "is_turn" in context else [],
        "wants_password": "approve" in verbs
        and any(permissions.needs_password(request, one) for one in approvals),
    }
    return _show(admin, request, lines, **{**shown, **context})


def _total(cards: Sequence[ApprovalCard]) -> dict[str, Any]:
    """Describe how many calls can be ticked, and the sum of their one number if all are of one tool.

    For the page's script, also describe the ticked calls: texts with gaps, and amounts by approval.
    """
    text = ngettext("%(count)d call can be ticked", "%(count)d calls can be ticked", len(cards))
    of_all = ngettext("{ticked} of %(count)d call ticked", "{ticked} of %(count)d calls ticked", len(cards))
    count = {"count": len(cards)}
    found = {"total": text % count, "ticked": of_all % count}
    tools = {one.approval.tool_name for one in cards}
    numbers = [{k: v for k, v in one.face.arguments.items() if type(v) in (int, float)} for one in cards]
    names = {tuple(each) for each in numbers}
    if len(cards) < 2 or len(tools) > 1 or len(names) > 1 or len(numbers[0]) != 1:
        return found
    [name] = numbers[0]
    values = [Decimal(str(each[name])) for each in numbers]
    units = {unit_in(one.face.title, _amount(name, value)) for one, value in zip(cards, values, strict=True)}
    if len(units) > 1:  # amounts of two currencies cannot be added
        return found
    is_cents, unit = name.endswith("cents"), units.pop()
    for key, amount in (("total", _amount(name, sum(values, Decimal()))), ("ticked", "{sum}")):
        found[key] = _("%(calls)s, %(name)s %(amount)s in total") % {
            "calls": found[key],
            "name": plain(named(name, 0)[0] if is_cents else name),
            "amount": f"{amount} {unit}".strip(),
        }
    plainly = {
        one.approval.pk: f"{value / 100:.2f}" if is_cents else f"{value:f}"
        for one, value in zip(cards, values, strict=True)
    }
    comma = get_format("THOUSAND_SEPARATOR") if get_format("NUMBER_GROUPING") == 3 else ""
    return {**found, "numbers": plainly, "point": get_format("DECIMAL_SEPARATOR"), "comma": comma}


def _amount(name: str, value: Decimal) -> str:
    """Format a number as a card does."""
    cents = named(name, int(value))[1] if name.endswith("cents") else ""
    return cents or number_format(value, force_grouping=True)


def _line(admin: ReadOnlyAdmin, request: HttpRequest, one: ApprovalCard, **said: str) -> Line:
    """Build one approval's line for the page; `said` is why it is left out, or its outcome."""
    approval, is_open = one.approval, not said.get("done") and not said.get("why_not")
    return {
        **(asked(one) if is_open else {"risk": risk_badge(approval)}),
        "approval": approval,
        "key": str(approval.pk),
        "title": visible(one.face.title),
        "label": plain(one.face.title),  # of its box: an attribute
        "url": admin.url(request, "change", approval.pk),
        "task": plain_line(one.face.run.title),
        "requester": person(approval.run.owner_name),
        "why_not": "",
        "done": "",
        **said,
    }


def _show(admin: ReadOnlyAdmin, request: HttpRequest, lines: list[Line], **context: Any) -> HttpResponse:
    context |= {"lines": lines, "count": sum(not line["why_not"] for line in lines)}
    context["list_url"] = (
        admin.url(request, "changelist") if "is_turn" in context else request.get_full_path()
    )
    return admin.render(request, None, template="agentruns/admin/bulk.html", **context)
