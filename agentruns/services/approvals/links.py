"""Signed links to an approval, for mails and chats. A link is void once anything about the call changes.

No row stores a link, because its single use follows from the journal. A link names the last row about its
call. Each decision adds such a row, in the transaction that checks that the approval is pending.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.core import signing
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import NotFoundError
from agentruns.journal import events
from agentruns.journal.policy import ask, visible_approvals
from agentruns.models import Approval, Message
from agentruns.services import permissions
from agentruns.services.api_tokens import credentials
from agentruns.services.approvals.decisions import find_approval

MAIL, SLACK = "mail", "slack"  # channels, which also keep the links of one from being used as the other's
SALT = "agentruns.links."


def is_offered(approval: Approval, channel: str) -> bool:
    """Check whether the policy lets people decide a pending approval in a channel without the console.

    False for a question, and for a high risk if AGENTRUNS_REAUTH_SECONDS requires a password.
    """
    wants_password = approval.risk == Approval.Risk.HIGH and settings.REAUTH_SECONDS is not None
    if approval.status != Approval.Status.PENDING or wants_password:
        return False
    asked = _rows(approval).filter(kind=events.APPROVAL_REQUESTED).values_list("facts", flat=True)
    is_question = any(facts.get("only_answers") for facts in asked)
    return not is_question and ask("without_console", False, approval, channel)


def sign(approval: Approval, channel: str, user: Any = None) -> str:
    """Sign a link to an approval as it is now, for one user, or in a chat for whoever presses its button."""
    whose = [] if user is None else [str(user.pk), _passwords(user)[0]]
    return signing.dumps([approval.pk.hex, approval.digest, _last_row(approval), *whose], salt=SALT + channel)


def follow(text: str, channel: str, seconds: int | None = None) -> tuple[Approval, Any, bool]:
    """Find a link's approval, its user (None in a chat), and whether the approval is as it was then.

    The last is False, too, for an approval that is not pending. Raises NotFoundError for a link that is
    forged or older than `seconds`, or whose user is gone, inactive, has another password, or may not read the
    approval any more.
    """
    gone = NotFoundError(_("This link is not valid any more."))
    try:
        key, digest, last_row, *whose = signing.loads(text, salt=SALT + channel, max_age=seconds)
    except signing.BadSignature:
        raise gone from None
    user = permissions.active_user(whose[0]) if whose else None
    if whose and (user is None or whose[1] not in _passwords(user)):
        raise gone
    approval = find_approval(key, visible_approvals(user) if whose else None)
    if whose and not permissions.reads_all(user, approval):
        raise gone
    is_same = (approval.digest, _last_row(approval)) == (digest, last_row)
    return approval, user, is_same and approval.status == Approval.Status.PENDING


def mail_url(approval: Approval, user: Any) -> str:
    """Build the URL at which a user can decide an approval without signing in; "" if there is none.

    There is none without AGENTRUNS_MAIL_LINK_SECONDS, for an approval that the policy leaves to the console,
    and for a user who may not decide it.
    """
    is_on = settings.MAIL_LINK_SECONDS is not None and is_offered(approval, MAIL)
    may_decide = (
        is_on and permissions.reads_all(user, approval) and any(permissions.decidable(user, [approval]))
    )
    return url_of(sign(approval, MAIL, user)) if may_decide else ""


def url_of(link: str) -> str:
    """Build the URL of a mail's link; "" without AGENTRUNS_BASE_URL, or without `agentruns.admin.links`."""
    with suppress(NoReverseMatch):
        return settings.BASE_URL and settings.BASE_URL.rstrip("/") + reverse("agentruns_decide", args=[link])
    return ""


def _passwords(user: Any) -> list[str]:
    """Compute digests of a user's password, which only this project can compute; the first is the newest."""
    return credentials(signing.Signer(salt=SALT).signature(str(user.pk)), user)


def _rows(approval: Approval) -> Any:
    """Select the journal rows about an approval's call, the last first; without reminders."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=approval.run_id, call_id=approval.call_id)
    return rows.exclude(kind__in=(events.APPROVAL_REMINDED, events.APPROVAL_ESCALATED)).order_by("-seq")


def _last_row(approval: Approval) -> int:
    last: int = _rows(approval).values_list("seq", flat=True)[0]
    return last
