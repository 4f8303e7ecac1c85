"""What is known of a run or an approval, as labelled values for its page."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from agentruns.admin.text import Body, Fact, body, plain, visible
from agentruns.admin.times import EMPTY, dated, exact
from agentruns.admin.waiting import is_live
from agentruns.conf import settings
from agentruns.models import Approval, Run


def of_run(run: Run) -> list[Fact]:
    """Return the facts of a run, the ones an operator asks for first at the top."""
    tokens = {name: amount for name, amount in run.usage.items() if name != "cost"}
    usage = ", ".join(f"{plain(name)} {amount}" for name, amount in tokens.items())
    found = [
        Fact(_("Run"), str(run.pk)),
        Fact(_("Agent"), _("%(agent)s, version %(version)s") % {"agent": run.agent, "version": run.version}),
        Fact(_("Session"), visible(run.session.key)),
        Fact(_("Requester"), visible(run.owner_name or EMPTY)),
        Fact(_("Started"), dated(run.created_at)),
        Fact(_("Last change"), dated(run.updated_at)),
        Fact(_("Model replies"), run.step),
        Fact(_("Tokens"), usage or EMPTY),
        Fact(_("Cost"), visible(run.usage.get("cost", EMPTY))),
        Fact(_("Worker"), _lease(run)),
        Fact(_("Worker last heard"), dated(_heard(run))),
        Fact(_("Crashes in a row"), run.attempts),
        Fact(_("Definition"), run.definition_id[:12], run.definition_id),
    ]
    if run.idempotency_key:
        found.append(Fact(_("Idempotency key"), visible(run.idempotency_key)))
    if run.not_before:
        found.append(Fact(_("Not before"), dated(run.not_before)))
    if run.blocked_reason:
        found.append(Fact(_("Why it is blocked"), visible(run.blocked_reason)))
    return found


def texts_of_run(run: Run) -> list[Body]:
    """Return input, output and error, in full."""
    found = [body(_("Input"), run.input)]
    if run.output:
        found.append(body(_("Output"), run.output))
    if run.error:
        found.append(body(_("Error"), run.error))
    return found


def of_approval(approval: Approval) -> list[Fact]:
    """Return the facts of an approval but for its arguments and its decision."""
    run = approval.run
    needed = _("%(given)d of %(required)d") % {
        "given": approval.approved_count,
        "required": approval.required,
    }
    return [
        Fact(_("Requester"), visible(run.owner_name or EMPTY)),
        Fact(_("Tool"), visible(approval.tool_name)),
        Fact(_("Agent"), _("%(agent)s, version %(version)s") % {"agent": run.agent, "version": run.version}),
        Fact(_("Session"), visible(run.session.key)),
        Fact(_("Asked"), dated(approval.requested_at)),
        Fact(_("Expires"), dated(approval.expires_at) if approval.expires_at else _("never")),
        Fact(_("Who may decide"), visible(approval.approvers or _("whoever may decide approvals"))),
        Fact(_("Approvals given"), needed),
        Fact(_("Digest"), approval.digest[:12], approval.digest),
    ]


def _heard(run: Run) -> datetime | None:
    """Return when the worker last extended its lease: it does so for a fixed time."""
    expires = run.lease_expires_at
    return expires - timedelta(seconds=settings.LEASE_SECONDS) if expires else None


def _lease(run: Run) -> str:
    if run.lease_expires_at is None:
        return _("none")
    template = _("%(owner)s until %(when)s") if is_live(run) else _("%(owner)s, silent since %(when)s")
    return template % {"owner": run.lease_owner[:8], "when": exact(run.lease_expires_at)}
