"""People who may decide approvals. They are checked at the decision, and again before the call runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import router
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import JournalUnreadableError
from agentruns.journal import events
from agentruns.journal.batch import Batch, reading_journal
from agentruns.journal.cards import CallApproval
from agentruns.journal.fold import Call, RunState, fold
from agentruns.journal.policy import ask, is_among, is_narrowed, is_somebody, user_of_key, visible_approvals
from agentruns.journal.read import read_rows
from agentruns.models import ApiToken, Approval, ApprovalRule, Message, Run, SessionBearer
from agentruns.models.statuses import ApprovalStatus, Verb
from agentruns.models.token import VISITOR
from agentruns.tools.options import REQUESTER

API_CHANNEL = "api:"  # before the prefix of the token with which a decision was made
_TOKENS = re.compile(f"{API_CHANNEL}ar_[a-z0-9]+$")
GIVING = (events.RUN_STARTED, events.RUN_ADOPTED, events.USER)  # rows that name a run's requesters and agent


def restore(run: Run, state: RunState | None = None) -> Run:
    """Set the columns of a run that its rows determine, such as requesters and owner, and return the run.

    Does not save the run. Nobody gains rights by altering a column, because the rows decide. Reads the rows
    unless `state` is given. Raises JournalUnreadableError if they are damaged or missing. Leaves a run that
    was pruned just now unchanged.
    """
    with reading_journal(run.session_id):
        if state is None:
            rows = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id, run_id=run.pk)
            state = fold(run.pk, read_rows(rows.filter(kind__in=GIVING).order_by("seq")))
        if state.started_at is None:
            if not Run.objects.using(settings.DATABASE).filter(pk=run.pk, session_id=run.session_id).exists():
                return run  # it was pruned just now, which the caller's next query finds out
            raise JournalUnreadableError(f"Run {run.pk} has no row in its session: run verify_journal.")
        folded = state.columns()
        columns = {name: folded[name] for name in ("version", "definition_id", "requesters")}
        assign(run, columns | state.given(run.session.scope if run.session.imported_at else None))
    return run


def owner_by_rows(run: Run) -> str | None:
    """Read the id of a run's owner, or None, from its `run_started` row; raises IndexError without it."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, kind=events.RUN_STARTED)
    owner = rows.order_by("-seq")[0].payload.get("owner")  # the last such row, after those that a fork copied
    return owner["id"] if owner else None


def assign(row: Run | Approval, columns: Mapping[str, Any]) -> None:
    """Set folded columns on a model instance without saving it, each converted to the type of its field.

    A value that cannot be converted is set unchanged, such as a user id of another user model.
    """
    for name, value in columns.items():
        setattr(row, name, value)
        with suppress(ValidationError):  # an id of another user model, which no user has here
            setattr(row, name, row._meta.get_field(name).to_python(value))  # type: ignore[union-attr]


def requester_ids(*ids: Any, origin: Run | None = None) -> list[str]:
    """List the ids of a run's requesters, each once: `ids` without None, then those of the run's origin."""
    asked = [str(each) for each in ids if each is not None]
    return list(dict.fromkeys(asked + (list(map(unquote, origin.requesters.split())) if origin else [])))


def requested(user: Any, run: Run) -> bool:
    """Check whether a user, or the person who acts in the user's name, is one of a run's requesters."""
    people = {str(user.pk), str(events.person_id(user))} - {"None"}
    return not people.isdisjoint(map(unquote, run.requesters.split()))


def why_not_decide(
    actor: Any,
    approval: Approval,
    arguments: dict[str, Any] | None = None,
    groups: Collection[str] | None = None,
    verb: str = Verb.APPROVE,
) -> str:
    """Explain why a user may not decide about an approval's call with `arguments`; "" if the user may.

    `arguments` default to those of the approval, `groups` to the names of the user's groups. `verb` matters
    for calls that the requester confirms. The program may decide everything. Raises the PermissionDeniedError
    of the project's policy, if the policy raises it.
    """
    if events.is_program(actor):
        return ""
    facts = {"tool": approval.tool_name, "approvers": approval.approvers, "name": actor.get_username()}
    refused = _("The project's policy does not let %(name)s decide this.") % facts
    if approval.approvers == REQUESTER:  # others than the requester may only deny the call
        if is_requester(actor, approval.run):
            # An edit would let the requester call the tool with arguments that the model never gave.
            changes = _("%(tool)s is confirmed as it is, or denied: %(name)s may not change it.") % facts
            return "" if verb in (Verb.APPROVE, Verb.DENY, Verb.ANSWER) else changes
        if verb == Verb.DENY and is_somebody(actor) and ask("can", False, actor, "decide", approval):
            return "" if ask("can_decide", False, actor, approval, approval.arguments) else refused
        return _("%(tool)s is confirmed by the requester, not by %(name)s.") % facts
    if not is_somebody(actor):
        return _("%(name)s is not active.") % facts
    if not ask("can", False, actor, "decide", approval):
        return _("%(name)s lacks the permission agentruns.decide_approval.") % facts
    if approval.approvers and not is_among(actor, approval.approvers, groups):
        return _("%(tool)s is decided by %(approvers)s; %(name)s is not among them.") % facts
    if why := why_own(actor, approval.run):
        return why
    given = approval.arguments if arguments is None else arguments
    return "" if ask("can_decide", False, actor, approval, given) else refused


def why_own(actor: Any, run: Run) -> str:
    """Explain that a user requested the run and so may not decide about its calls; "" if the user may."""
    if settings.REQUESTER_MAY_APPROVE or not requested(actor, run):
        return ""
    text = _("%(name)s requested this run, and requesters may not decide about their own.")
    return text % {"name": actor.get_username()}


def is_requester(actor: Any, run: Run) -> bool:
    """Check whether an actor may confirm a run's calls, as its owner or as a visitor of its session."""
    if isinstance(actor, SessionBearer):
        return actor.session_id == run.session_id
    return is_somebody(actor) and run.owner_id is not None and run.owner_id == actor.pk


def lapsed(
    approval: Approval, given: Iterable[str], arguments: dict[str, Any], by: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Map each user who approved a call and may not approve it any more to the reason.

    `given` are user ids from the journal; `by` maps some to the person who acted in the user's name. The ids
    of the program and of the session's visitors are never in the result. Calls the project's policy, so it
    must run outside of every transaction.
    """
    model, reasons = get_user_model(), {}
    users = model._base_manager.using(router.db_for_write(model))  # a replica may not know yet
    confirmed = f"{VISITOR}{approval.run.session_id}"  # a visitor, whose token was checked at the decision
    for key in dict.fromkeys(each for each in given if each not in ("", confirmed)):
        if (user := user_of_key(key, users)) is None:
            reasons[key] = _("User %(id)s is gone.") % {"id": key}
            continue
        if by_id := (by or {}).get(key):
            person = user_of_key(by_id, users)
            if not (person and is_somebody(person)):
                reasons[key] = _("User %(id)s, who approved in this name, is not active.") % {"id": by_id}
                continue
            user.agentruns_person = person
        visible = visible_approvals(user)
        if is_narrowed(visible) and not visible.filter(pk=approval.pk).exists():
            reasons[key] = _("%(name)s may not see it any more.") % {"name": user.get_username()}
        elif why := why_not_decide(user, approval, arguments):
            reasons[key] = why
    return reasons


def withdrawn(alias: str, approval: CallApproval | None) -> dict[str, str]:
    """Map each user or visitor who approved with a token that was revoked or deleted to the reason.

    A token that expired is not withdrawn. Maps "" to the reason if the rule that approved is not active.
    """
    if approval and approval.rule and approval.given:
        rules = ApprovalRule.objects.using(alias).filter(pk=approval.rule, status=ApprovalRule.Status.ACTIVE)
        return {} if rules.exists() else {"": _("The standing rule that approved it is not active any more.")}
    channels = {key: approval.channels[key] for key in approval.given} if approval else {}
    used = {key: channel[len(API_CHANNEL) :] for key, channel in channels.items() if _TOKENS.match(channel)}
    tokens = ApiToken.objects.using(alias).filter(prefix__in=used.values(), revoked_at=None)
    valid = {*tokens.values_list("prefix", flat=True)} if used else set()
    why = _("It was approved with token %(token)s, which was revoked.")
    return {key: why % {"token": prefix} for key, prefix in used.items() if prefix not in valid}


def void(batch: Batch, call: Call, lost: Mapping[str, str]) -> None:
    """Add a row that voids the approvals given by the users in `lost`, so that the call is pending again.

    If one of these users edited the arguments, the card says so from then on: the next must not trust them.
    Does nothing if none of these users approved, or if the approval was already denied or used.
    """
    approval = call.approval
    if approval is None or approval.status not in (ApprovalStatus.PENDING, ApprovalStatus.APPROVED):
        return
    if gone := [key for key in approval.given if key in lost]:
        why = " ".join(lost[key] for key in dict.fromkeys(gone))
        payload: events.ApprovalVoided = {"approval": str(approval.id), "voided": gone, "why": why}
        if approval.editor in gone:
            name = approval.names[approval.given.index(approval.editor)]
            text = _("%(name)s edited the arguments, and that counts no more: compare them.")
            payload["asks"] = f"{text % {'name': name}} {why} {approval.why}"
        batch.add(events.APPROVAL_VOIDED, payload, call=call)
