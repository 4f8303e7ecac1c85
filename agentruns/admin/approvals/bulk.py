"""Deciding several approvals on one page: those selected in the list, or all that one reply waits for."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import get_format, number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin.approvals.card import ApprovalCard, asked
from agentruns.admin.approvals.decide import decide, done, no_password, outcome
from agentruns.admin.approvals.texts import unit_in
from agentruns.admin.filters import is_uuid
from agentruns.admin.forms import NoteForm
from agentruns.admin.html import named, person, plain, plain_line, risk_badge, visible
from agentruns.exceptions import AgentRunsError
from agentruns.models import Approval, Run
from agentruns.services import permissions

if TYPE_CHECKING:
    from agentruns.admin.approvals.admin import ApprovalAdmin

MOST = 100  # what one page can show and one person can look at
VERBS = ("approve", "deny")
TITLES = {"approve": gettext_lazy("Approve these calls?"), "deny": gettext_lazy("Deny these calls?")}

Line = dict[str, Any]  # one approval of the page: as it will be decided, or as it was


def decide_selected(admin: ApprovalAdmin, request: HttpRequest, verb: str) -> HttpResponse | None:
    """Ask, then decide on the ids that were on the page, whatever else "select all" may mean."""
    approvals = _chosen(request, admin.get_queryset(request))
    if len(approvals) > MOST:
        text = _("Choose at most %(most)d: nobody can check more on one page.") % {"most": MOST}
        admin.message_user(request, text, messages.WARNING)
        return None
    confirmed, title = "confirmed" in request.POST, str(TITLES[verb])
    if request.POST.get("select_across") == "1" and not confirmed:
        text = _("Only what was on the page is decided: %(count)d.") % {"count": len(approvals)}
        admin.message_user(request, text, messages.WARNING)
    if not confirmed:
        return _ask(admin, request, approvals, (verb,), title=title)
    if refused := _refused(request, verb, approvals, (verb,)):
        return _ask(admin, request, approvals, (verb,), title=title, **refused)
    lines = _decide(admin, request, verb, approvals)
    return _show(admin, request, lines, title=_("Outcome of each"), outcome=True)


def turn_view(admin: ApprovalAdmin, request: HttpRequest, run_id: str) -> HttpResponse:
    """Show the calls of a run that wait; decide those that are ticked, each by itself."""
    if not admin.has_view_permission(request):
        raise PermissionDenied
    if not is_uuid(run_id):
        raise Http404(_("There is no run %(id)s.") % {"id": plain(run_id)})
    rows = admin.get_queryset(request).filter(run_id=run_id).order_by("requested_at", "id")
    waiting = list(rows.filter(status=Approval.Status.PENDING))
    verb, chosen = request.POST.get("verb", ""), _chosen(request, rows)
    if request.method == "POST" and verb in VERBS and chosen:
        if not (refused := _refused(request, verb, chosen, VERBS)):
            return _decide_turn(admin, request, run_id, verb, chosen)
    else:
        text = _("Nothing was decided: tick at least one call.")
        refused = {"status": 400, "refusal": text} if request.method == "POST" else {}
    if not waiting:
        admin.message_user(request, _("Nothing of this run waits for a decision."), messages.INFO)
        return HttpResponseRedirect(admin.url(request, "changelist"))
    run = waiting[0].run
    title = ngettext("%(agent)s asks for a decision", "%(agent)s asks for %(count)d decisions", len(waiting))
    title %= {"agent": plain(run.agent), "count": len(waiting)}
    run_url = admin.other_page(request, Run, run.pk)
    return _ask(admin, request, waiting, VERBS, title=title, run_url=run_url, is_turn=True, **refused)


def _decide_turn(
    admin: ApprovalAdmin, request: HttpRequest, run_id: str, verb: str, chosen: list[Approval]
) -> HttpResponse:
    queue = admin.queue(request)  # before they are decided: afterwards they have no place in it
    for line in _decide(admin, request, verb, chosen):
        lost = _("Your decision was not recorded. %(why)s") % {"why": line["why_not"]}
        level = messages.SUCCESS if line["done"] else messages.WARNING
        admin.tell(request, line["approval"], line["done"] or lost, level)
    left = admin.get_queryset(request).filter(run_id=run_id, status=Approval.Status.PENDING)
    if left.exists():
        return HttpResponseRedirect(admin.url(request, "turn", run_id))
    return admin.onward(request, chosen[-1], queue)


def _chosen(request: HttpRequest, rows: Any) -> list[Approval]:
    """Return the approvals that were ticked, in the order of the page."""
    keys = [UUID(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME) if is_uuid(key)]
    found = rows.in_bulk(keys[: MOST + 1]) if keys else {}
    return [found[key] for key in dict.fromkeys(keys) if key in found]


def _refused(
    request: HttpRequest, verb: str, approvals: list[Approval], verbs: Sequence[str]
) -> dict[str, Any]:
    """Return why nothing is decided, for the page; empty if all is there that the verb needs."""
    form = NoteForm(request.POST, needs=verb == "deny", verbs=verbs)
    if not form.is_valid():
        return {"form": form, "status": 400, "refusal": _("Nothing was decided. Correct the form below.")}
    why = no_password(request, approvals) if verb == "approve" else ""
    return {"form": form, "status": 403, "refusal": why} if why else {}


def _decide(admin: ApprovalAdmin, request: HttpRequest, verb: str, approvals: list[Approval]) -> list[Line]:
    """Decide each; one that is refused stops no other."""
    # Sessions in one order for everybody: two bulk decisions in transactions never wait for each other.
    in_order = sorted(admin.cards(request, approvals), key=lambda one: one.approval.run.session_id)
    decided = {one.approval.pk: _decided(admin, request, verb, one) for one in in_order}
    return [decided[approval.pk] for approval in approvals]


def _decided(admin: ApprovalAdmin, request: HttpRequest, verb: str, one: ApprovalCard) -> Line:
    approval, digest = one.approval, request.POST.get(f"digest-{one.approval.pk}")
    if digest is None:  # was skipped when the person looked
        return _line(admin, request, one, why_not=_why_not(one, verb) or _("It was not on the page."))
    reason = NoteForm(request.POST)["reason"].value() or ""
    try:
        approval = decide(approval, request.user, verb, digest, reason.strip())
    except AgentRunsError as error:
        again = admin.find(request, approval.pk)
        return _line(admin, request, one, why_not=outcome(again) or plain(error))
    logged = _("Approved in bulk.") if verb == "approve" else _("Denied: %s") % plain(reason)
    admin.log_change(request, approval, logged)
    return _line(admin, request, one, done=done(approval, verb))


def _why_not(one: ApprovalCard, verb: str) -> str:
    """Return why this user cannot decide one so, or ""."""
    if not one.pending:
        return outcome(one.approval)
    if verb == "approve" and one.only_answers:
        return _("A question is answered, not approved.")
    return one.why_not or (one.why_not_approve if verb == "approve" else "")


def _ask(
    admin: ApprovalAdmin,
    request: HttpRequest,
    approvals: list[Approval],
    verbs: Sequence[str],
    **context: Any,
) -> HttpResponse:
    """Show what will be decided, and with which verbs."""
    is_list = "is_turn" not in context and "confirmed" not in request.POST  # its ticks only bring them here
    ticked = [] if is_list else request.POST.getlist(ACTION_CHECKBOX_NAME)
    cards, lines = admin.cards(request, approvals), []
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
    """Return how many calls can be ticked, and the sum of the one number that all calls of one tool take.

    And the same of the ticked ones for the page's script: the words with gaps, and the number of each call.
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
    if len(units) > 1:  # a sum of two currencies is none
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
    """Return a number as a card writes it."""
    cents = named(name, int(value))[1] if name.endswith("cents") else ""
    return cents or number_format(value, force_grouping=True)


def _line(admin: ApprovalAdmin, request: HttpRequest, one: ApprovalCard, **said: str) -> Line:
    """Return one approval for the page; `said` is why it is left out, or what became of it."""
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


def _show(admin: ApprovalAdmin, request: HttpRequest, lines: list[Line], **context: Any) -> HttpResponse:
    context |= {"lines": lines, "count": sum(not line["why_not"] for line in lines)}
    context["list_url"] = (
        admin.url(request, "changelist") if "is_turn" in context else request.get_full_path()
    )
    return admin.render(request, None, template="agentruns/admin/bulk.html", **context)
