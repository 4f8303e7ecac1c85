"""E-mails to staff: set AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from smtplib import SMTPRecipientsRefused
from typing import Any

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Error, Warning
from django.core.mail import send_mail
from django.db.models import QuerySet, TextChoices
from django.utils import timezone
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.journal.outbox import ASKING, Notice, UndeliverableError
from agentruns.journal.policy import user_of_key, visible_approvals, visible_runs
from agentruns.models import Approval, Run
from agentruns.services.approvals import links
from agentruns.services.approvals.decisions import find_approval
from agentruns.services.recipients import address_of, recipients, users_with
from agentruns.tools.card import one_line
from agentruns.utils import characters, lanes, redaction

# Seconds for a whole delivery, because the time limit of a socket begins anew with each byte.
TIMEOUT = 8
THREADS = 8  # most deliveries of a process at once, including those that timed out and still hang
MISSING = "AGENTRUNS_NOTIFY_EMAILS is no list of addresses, or empty although users have no address."
NO_SUCH = 500  # from this code of SMTP on an address is refused for good

_lane = lanes.Lane("agentruns-mail", THREADS)


class MailNotifier:
    """The notifier that mails staff if a run needs a person. A subclass may set other `events`."""

    events: tuple[str, ...] = (*ASKING, "run.orphaned", "run.paused", "run.blocked")

    def recipients(self, notice: Notice) -> list[Any] | None:
        """List the users who get a mail each; None if AGENTRUNS_NOTIFY_EMAILS names the addresses."""
        if settings.NOTIFY_EMAILS or notice.is_settled:
            return None
        return [user for user in recipients(notice) if address_of(user)]

    def __call__(self, notice: Notice) -> None:
        """Mail the notice to its recipient, or to the addresses of AGENTRUNS_NOTIFY_EMAILS that may read it.

        A user may read the notice who may see the approval or run, and an address that no such user has.
        Sends nothing for an approval that is no longer pending. Raises UndeliverableError for an address that
        does not exist, TimeoutError after TIMEOUT, and the errors of the mail backend.
        """
        if notice.is_settled:
            return
        visible: Callable[[Any], QuerySet[Any]] = visible_approvals if notice.approval_id else visible_runs

        def may_read(user: Any) -> bool:
            return visible(user).filter(pk=notice.approval_id or notice.run_id).exists()

        if notice.recipient:
            person = user_of_key(notice.recipient)
            owners = {address_of(person): [person]}
        else:
            person, owners = None, {address: users_with(address) for address in settings.NOTIFY_EMAILS}
        readers = [each for each, users in owners.items() if not users or any(map(may_read, users))]
        if not readers:
            return
        subject, body = self.text(notice, person)  # before the lane, in this thread's language
        try:
            _lane(lambda: send_mail(subject, body, None, readers), TIMEOUT)
        except SMTPRecipientsRefused as error:
            if notice.recipient and all(code >= NO_SUCH for code, _text in error.recipients.values()):
                raise UndeliverableError("The mail server refuses the address.") from error
            raise

    def text(self, notice: Notice, person: Any) -> tuple[str, str]:
        """Build the subject and the body of a mail to a user; `person` is None for a list of addresses."""
        # On one line, because a line break, which a model may write, would begin another header.
        title = one_line(notice.title or notice.tool or notice.agent, 110)
        subject = f"[agentruns] {headline(notice)}: {characters.isolated(title)}"
        shown = [f"{label}: {characters.isolated(value)}" for label, value in facts(notice)]
        approval = find_approval(notice.approval_id or "") if person and notice.type in ASKING else None
        if approval and (url := links.mail_url(approval, person)):
            shown.append(f"{_('Decide without signing in, once')}: {url}")
        return subject, "\n".join([subject, "", *shown, ""])

    def check(self) -> Iterator[CheckMessage]:
        """Yield an Error if there are no addresses, and a Warning if SMTP has no time-out."""
        people, has_addresses = settings.NOTIFY_EMAILS, hasattr(get_user_model(), "get_email_field_name")
        if not isinstance(people, list | tuple) or not (people or has_addresses):
            hint = "AGENTRUNS_NOTIFY_EMAILS = ['support@example.org'], or remove the mail notifier."
            yield Error(MISSING, hint=hint, id="agentruns.E011")
        if settings.MAIL_LINK_SECONDS is not None and not links.url_of("x"):
            text = "AGENTRUNS_MAIL_LINK_SECONDS needs AGENTRUNS_BASE_URL and the URL of the links."
            hint = "path('decide/', include('agentruns.admin.links')), as in docs/howto/mail-links.md."
            yield Error(text, hint=hint, id="agentruns.E031")
        mailers: dict[str, Any] | None = getattr(django_settings, "MAILERS", None)  # from Django 6.1 on
        if mailers is not None:
            default = mailers.get("default", {})
            backend, timeout = default.get("BACKEND", ""), default.get("OPTIONS", {}).get("timeout")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Django itself warns that 6.1 stops reading these
                backend, timeout = django_settings.EMAIL_BACKEND, django_settings.EMAIL_TIMEOUT
        if backend.endswith("smtp.EmailBackend") and timeout is None:
            text = "SMTP has no time-out: a mail server that does not answer blocks a worker for ever."
            hint = "EMAIL_TIMEOUT = 5, or OPTIONS['timeout'] in MAILERS."
            yield Warning(text, hint=hint, id="agentruns.W004")


def headline(notice: Notice) -> str:
    """Say in a few words what a notice is about."""
    return {
        "approval.requested": _("Approval needed"),
        "approval.reminded": _("Approval still needed"),
        "approval.escalated": _("Approval needed, nobody has decided"),
        "run.orphaned": _("A call is in doubt"),
        "run.paused": _("A run is paused"),
        "run.blocked": _("Runs are blocked"),
        "budget.low": _("A budget is nearly used up"),
    }.get(notice.type, notice.type)


def facts(notice: Notice) -> list[tuple[str, str]]:
    """List the facts of a notice that are not empty, as (label, value); each value is on one line."""
    expires = timezone.localtime(notice.expires_at) if notice.expires_at else None
    statuses: type[TextChoices] = Approval.Status if notice.approval_id else Run.Status
    risk, status = (
        str(choices(value).label) if value in choices.values else value
        for choices, value in ((Approval.Risk, notice.risk), (statuses, notice.status))
    )
    lines = [
        (_("What"), notice.title),
        (_("Tool"), notice.tool),
        (_("Risk"), risk),
        (_("Status"), status),
        (_("Requester"), redaction.redact(notice.requester) or _("the program")),
        (_("Agent"), notice.agent),
        (_("Session"), redaction.redact(notice.session)),
        (_("Run"), str(notice.run_id)),
        (_("Expires"), f"{expires:%Y-%m-%d %H:%M %Z}" if expires else ""),
        (_("Open it here"), notice.url),
    ]
    return [(label, one_line(value)) for label, value in lines if value]
