"""The views that decide one approval on its card, or several approvals on one page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.crypto import salted_hmac
from django.utils.formats import get_format, number_format
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns.admin import filters, forms, html
from agentruns.admin.approvals import verbs
from agentruns.admin.approvals.card import ApprovalCard, asked, cards_of, unit_in
from agentruns.admin.approvals.verbs import EDIT, EXTEND
from agentruns.admin.base import ReadOnlyAdmin, following, is_uuid, mask_for, status_of, ticked
from agentruns.exceptions import AgentRunsError, ApprovalStateError, PermissionDeniedError
from agentruns.journal.deciders import why_not_decide
from agentruns.models import Approval, Run, statuses
from agentruns.models.statuses import Verb
from agentruns.services import permissions
from agentruns.tools import to_jsonable
from agentruns.utils import json as canonical

VERBS = (Verb.APPROVE, Verb.DENY)  # of a page for several
TITLES: dict[str, Any] = {
    Verb.APPROVE: gettext_lazy("Approve these calls?"),
    Verb.DENY: gettext_lazy("Deny these calls?"),
}
UNDECIDED = gettext_lazy("Nothing was decided. %(why)s")
WARNED_SALT = "agentruns.admin.approvals.warned"
WARNED = gettext_lazy(
    "Nothing was decided yet. With these arguments the tool's preview warns:{}"
    " If you mean it, approve with these arguments again."
)
Line = dict[str, Any]  # one approval of a page for several, before or after its decision


def decide_view(admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, verb: str) -> HttpResponse:
    """Record the decision `verb` (approve, deny, edit, answer or extend), and redirect to the next open card.

    After "extend" it redirects to the same card. If nothing is recorded, it shows the card with the reason,
    such as a wrong password, a refusal, or warnings about edited arguments that the user has not seen yet. A
    decision that is sent twice counts as recorded. A worker runs an approved call later.
    """
    form: Any
    user, revealed = request.user, False
    if verb == EDIT:
        revealed = "revealed" in request.POST and permissions.may_reveal(user, approval)
        [card] = cards_of(user, [approval], revealed=revealed)
        form = card.edit_form(request.POST)
    else:
        form = verbs.form_of(verb, approval, request.POST)
    if form is None:
        return _refused(admin, request, approval, ApprovalStateError(_("It cannot be edited here.")))
    name = "decide" if verb in VERBS else verb
    sent: dict[str, Any] = {f"{name}_form": form, "denying": verb == Verb.DENY}
    page = partial(admin.page, request, approval, revealed=revealed)
    if not form.is_valid():
        text = _("Nothing was decided. Correct the form below.")
        if verb == Verb.DENY and not request.POST.get("reason", "").strip():
            text = _("Nothing was decided yet. Say why, and press Deny again.")
        return page(status=400, refusal=text, **sent)
    may = verb == EDIT and card.pending and not why_not_decide(user, approval, verb=EDIT)
    if may and (warnings := card.warned_of(form.arguments)):  # `preview` is called for deciders only
        seen = [str(approval.pk), str(user.pk), to_jsonable(form.arguments)[0], *map(str, warnings)]
        # Keyed, so that nobody can guess hidden arguments from it.
        mark = salted_hmac(WARNED_SALT, canonical.dumps(seen), algorithm="sha256").hexdigest()
        if request.POST.get("warned") != mark:
            text = format_html(str(WARNED), format_html_join("", " {}.", ((each,) for each in warnings)))
            return page(status=400, refusal=text, warned=mark, **sent)
    if verb in (Verb.APPROVE, EDIT) and (why := why_no_password(request, approval.risk)):
        return page(status=403, refusal=UNDECIDED % {"why": why}, **sent)
    waiting = queue(admin, request)  # before it is decided: afterwards it has no place in the queue
    try:
        edited = form.arguments if verb == EDIT else None
        approval = verbs.decide(approval, user, verb, form.cleaned_data, edited)
    except PermissionDeniedError as error:
        return _refused(admin, request, approval, error)
    except AgentRunsError as error:
        again = admin.find(request, approval.pk)
        if verbs.is_same(again, user, verb, form):  # a double click
            return admin.back(request, again, verbs.outcome(again))
        return _refused(admin, request, approval, error, revealed=revealed, **sent)
    admin.log_change(request, approval, verbs.log_text(verb, form.cleaned_data))
    _show_outcome(admin, request, approval, verbs.done(approval, verb))
    return admin.back(request, approval) if verb == EXTEND else _go_on(admin, request, approval, waiting)


def _refused(
    admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, error: AgentRunsError, **context: Any
) -> HttpResponse:
    """Show the card as it is now, with the reason why nothing was recorded."""
    approval, status = admin.find(request, approval.pk), status_of(error)
    why, pending = html.plain(error), approval.status == Approval.Status.PENDING
    if status == 409 and not pending:
        why = verbs.outcome(approval)
    elif status == 409 and approval.digest != request.POST.get("digest"):
        why = _("Its arguments were edited since you looked. This is what it asks now.")
        if approval.holds is not None:
            why = _("It has changed since you looked. This is what it asks now.")
        context = {}
    text = _("Your decision was not recorded. %(why)s") % {"why": why}
    return admin.page(request, approval, status=status, refusal=text, **(context if pending else {}))


def why_no_password(request: HttpRequest, *risks: str) -> str:
    """Explain that the password is missing or wrong; "" if it is right, or if no risk needs one.

    A right password is remembered, so that the next approvals need none for a while.
    """
    if not any(permissions.needs_password(request, risk) for risk in risks):
        return ""
    password = request.POST.get("password", "")
    if not password:
        return _("The risk is high: give your password, too.")
    return permissions.confirm_password(request, password)


def queue(admin: ReadOnlyAdmin, request: HttpRequest) -> list[UUID]:
    """List the ids of pending approvals in the list that the user came from, in its order; at most QUEUED."""
    query = QueryDict(request.GET.get("_changelist_filters", ""), mutable=True)
    query.pop("p", None)  # the cards of all pages
    listed = admin.get_queryset(request).order_by(*filters.URGENT_FIRST)
    if query:  # without filters the plain order suffices, which is cheaper
        with suppress(IncorrectLookupParameters):  # not from a list of ours
            listed = admin.listing(request, query).queryset
    return list(listed.filter(status=statuses.PENDING).values_list("pk", flat=True)[: filters.QUEUED])


def _go_on(admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, queue: list[UUID]) -> HttpResponse:
    """Redirect to the next card in `queue` that the user can decide, or to the list if there is none."""
    keys = following(queue, approval.pk)
    pending = Approval.objects.using(approval._state.db).pending().select_related("run")
    waiting = pending.filter(pk__in=keys).defer(*filters.HEAVY).in_bulk()
    for card in permissions.decidable(request.user, [waiting[key] for key in keys if key in waiting]):
        return HttpResponseRedirect(admin.url(request, "change", card.pk))
    admin.message_user(request, _("Nothing else waits for you."), messages.INFO)
    return HttpResponseRedirect(admin.url(request, "changelist"))


def _show_outcome(
    admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval, text: str, level: int = messages.SUCCESS
) -> None:
    """Show the outcome of an approval as a message, with a link to the approval's card."""
    url, title = admin.url(request, "change", approval.pk), mask_for(approval.run).approval(approval).title
    admin.message_user(request, format_html('{} <a href="{}">{}</a>', text, url, html.visible(title)), level)


def decide_selected(
    admin: ReadOnlyAdmin, request: HttpRequest, verb: str, approvals: list[Approval]
) -> HttpResponse:
    """Show the page that asks for confirmation; after it, decide each approval and show each outcome."""
    is_confirmed = "confirmed" in request.POST
    refused = _refusal(request, verb, approvals, (verb,)) if is_confirmed else {}
    if refused or not is_confirmed:
        return _ask(admin, request, approvals, (verb,), title=str(TITLES[verb]), **refused)
    lines = _decide(admin, request, verb, approvals)
    return admin.render(
        request,
        None,
        title=_("Outcome of each"),
        template="bulk",
        lines=lines,
        outcome=True,
        count=sum("done" in line for line in lines),
        list_url=request.get_full_path(),
    )


def turn_view(admin: ReadOnlyAdmin, request: HttpRequest, run_id: str) -> HttpResponse:
    """Show a run's pending approvals on one page; a POST decides each ticked approval by itself.

    Redirects to the list if none is pending. Raises Http404 for an id that is no UUID.
    """
    if not is_uuid(run_id):
        raise Http404(_("There is no run %(id)s.") % {"id": html.plain(run_id)})
    rows = admin.get_queryset(request).filter(run_id=run_id).order_by("requested_at", "id")
    waiting, refused = list(rows.filter(status=statuses.PENDING)), dict[str, Any]()
    verb, chosen = request.POST.get("verb", ""), ticked(request, rows)
    if request.method == "POST" and verb in VERBS and chosen:
        refused = _refusal(request, verb, chosen, VERBS)
        if not refused:
            others = queue(admin, request)  # before they are decided: afterwards they have no place in it
            for line in _decide(admin, request, verb, chosen):
                text, level = line.get("done"), messages.SUCCESS
                if text is None:
                    text = _("Your decision was not recorded. %(why)s") % {"why": line["why_not"]}
                    level = messages.WARNING
                _show_outcome(admin, request, line["card"].approval, text, level)
            if admin.get_queryset(request).filter(run_id=run_id, status=statuses.PENDING).exists():
                return HttpResponseRedirect(admin.url(request, "turn", run_id))
            return _go_on(admin, request, chosen[-1], others)
    elif request.method == "POST":
        refused = {"status": 400, "refusal": _("Nothing was decided: tick at least one call.")}
    if not waiting:
        admin.message_user(request, _("Nothing of this run waits for a decision."), messages.INFO)
        return HttpResponseRedirect(admin.url(request, "changelist"))
    run = waiting[0].run
    title = ngettext("%(agent)s asks for a decision", "%(agent)s asks for %(count)d decisions", len(waiting))
    title %= {"agent": html.plain(run.agent), "count": len(waiting)}
    run_url = admin.other_page(request, Run, run.pk)
    return _ask(admin, request, waiting, VERBS, title=title, run_url=run_url, is_turn=True, **refused)


def _refusal(
    request: HttpRequest, verb: str, approvals: list[Approval], choice: Sequence[str]
) -> dict[str, Any]:
    """Build the context that explains a wrong or missing reason or password; {} if neither is wrong."""
    form = forms.NoteForm(request.POST, needs=verb == Verb.DENY, verbs=choice)
    if not form.is_valid():
        return {"form": form, "status": 400, "refusal": _("Nothing was decided. Correct the form below.")}
    why = why_no_password(request, *(each.risk for each in approvals)) if verb == Verb.APPROVE else ""
    return {"form": form, "status": 403, "refusal": UNDECIDED % {"why": why}} if why else {}


def _decide(admin: ReadOnlyAdmin, request: HttpRequest, verb: str, approvals: list[Approval]) -> list[Line]:
    """Decide each approval, and describe each outcome. A refused decision does not stop the others."""
    reason, lines = forms.NoteForm(request.POST)["reason"].value() or "", dict[UUID, Line]()
    # Sessions in one order for everybody: two bulk decisions in transactions never wait for each other.
    for card in sorted(cards_of(request.user, approvals), key=lambda card: card.approval.run.session_id):
        approval, digest = card.approval, request.POST.get(f"digest-{card.approval.pk}")
        line = lines[approval.pk] = {"card": card}
        if digest is None:  # was skipped when the person looked
            line["why_not"] = card.why_not_now(verb) or _("It was not on the page.")
            continue
        try:
            given = {"digest": digest, "reason": reason.strip()}
            approval = verbs.decide(approval, request.user, verb, given)
        except AgentRunsError as error:
            line["why_not"] = verbs.outcome(admin.find(request, approval.pk)) or html.plain(error)
        else:
            logged = _("Approved in bulk.") if verb == Verb.APPROVE else _("Denied: %s") % html.plain(reason)
            admin.log_change(request, approval, logged)
            line["done"] = verbs.done(approval, verb)
    return [lines[approval.pk] for approval in approvals]


def _ask(
    admin: ReadOnlyAdmin,
    request: HttpRequest,
    approvals: list[Approval],
    choice: Sequence[str],
    **context: Any,
) -> HttpResponse:
    """Show the page on which a person ticks approvals and chooses one of the verbs in `choice`."""
    is_turn = "is_turn" in context
    is_list = not is_turn and "confirmed" not in request.POST  # the list's ticks only select
    ticked = [] if is_list else request.POST.getlist(ACTION_CHECKBOX_NAME)
    cards, lines = cards_of(request.user, approvals), list[Line]()
    for card in cards:
        whys = [card.why_not_now(verb) for verb in choice]
        line = {"card": card, "hint": whys[0], **({"why_not": whys[0]} if all(whys) else asked(card))}
        is_warned = Verb.APPROVE in choice and any(flag.tone == "bad" for flag in line.get("flags", ()))
        line["ticked"] = not any(whys) and (str(card.approval.pk) in ticked if ticked else not is_warned)
        lines.append(line)
    sums = total([line["card"] for line in lines if "why_not" not in line])
    for line in lines:
        line["number"] = sums.get("numbers", {}).get(line["card"].approval.pk, "")
    wants_password = any(permissions.needs_password(request, approval.risk) for approval in approvals)
    given = {
        "form": forms.NoteForm(verbs=choice),
        "verbs": choice,
        "total": sums,
        "lines": lines,
        "count": sum("why_not" not in line for line in lines),
        "quotes": cards[0].quotes if is_turn else [],
        "wants_password": Verb.APPROVE in choice and wants_password,
        "list_url": admin.url(request, "changelist") if is_turn else request.get_full_path(),
    }
    return admin.render(request, None, template="bulk", **{**given, **context})


def total(cards: Sequence[ApprovalCard]) -> dict[str, Any]:
    """Sum the amounts of the calls that can be ticked; {} if the amounts cannot be added.

    They can be added if several calls use one tool, each with one number of the same name, in one currency.
    For the page's script, the dict also has `sum`, a placeholder with the currency, and the amount of each
    approval.
    """
    tools = {card.approval.tool_name for card in cards}
    numbers = [{k: v for k, v in card.face.arguments.items() if type(v) in (int, float)} for card in cards]
    names = {tuple(each) for each in numbers}
    if len(cards) < 2 or len(tools) > 1 or len(names) > 1 or len(numbers[0]) != 1:
        return {}
    [name] = numbers[0]
    is_cents, values = name.endswith("cents"), [Decimal(str(each[name])) for each in numbers]

    def amount(value: Decimal) -> str:
        """Format a number as a card does."""
        cents = html.named(name, int(value))[1] if is_cents else ""
        return cents or number_format(value, force_grouping=True)

    units = {unit_in(card.face.title, amount(value)) for card, value in zip(cards, values, strict=True)}
    if len(units) > 1:  # amounts of two currencies cannot be added
        return {}
    unit = units.pop()
    plainly = [f"{value / 100:.2f}" if is_cents else f"{value:f}" for value in values]
    return {
        "name": html.plain(html.named(name, 0)[0] if is_cents else name),
        "amount": f"{amount(sum(values, Decimal()))} {unit}".strip(),
        "sum": f"{{sum}} {unit}".strip(),
        "numbers": {card.approval.pk: number for card, number in zip(cards, plainly, strict=True)},
        "point": get_format("DECIMAL_SEPARATOR"),
        "comma": get_format("THOUSAND_SEPARATOR") if get_format("NUMBER_GROUPING") == 3 else "",
    }
