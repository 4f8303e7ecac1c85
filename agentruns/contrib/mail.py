"""E-mails to staff: set AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import send_mail
from django.db.models import QuerySet, TextChoices
from django.utils import timezone
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.journal.outbox import Notice
from agentruns.journal.policy import visible_approvals, visible_runs
from agentruns.models import Approval, Run
from agentruns.tools.card import one_line
from agentruns.utils import characters, lanes, redaction

# Seconds for a whole delivery, because the time limit of a socket begins anew with each byte.
TIMEOUT = 8
THREADS = 8  # most deliveries of a process at once, including those that timed out and still hang
MISSING = "AGENTRUNS_NOTIFY_EMAILS has no address."

_lane = lanes.Lane("agentruns-mail", THREADS)


class MailNotifier:
    """The notifier that mails staff if a run needs a person. A subclass may set other `events`."""

    events: tuple[str, ...] = ("approval.requested", "run.orphaned", "run.paused", "run.blocked")

    def __call__(self, notice: Notice) -> None:
        """Mail the notice to the addresses of AGENTRUNS_NOTIFY_EMAILS that may read it.

        An address may read the notice if no user has this address, or if a user who has it may see the
        approval or run. Sends nothing for an approval that is no longer pending. Raises ImproperlyConfigured
        if the setting has no address, TimeoutError after TIMEOUT, and the errors of the mail backend.
        """
        if not (people := settings.NOTIFY_EMAILS):
            raise ImproperlyConfigured(MISSING)
        if notice.type == "approval.requested" and notice.status != Approval.Status.PENDING:
            return  # somebody decided before the delivery
        users, readers = get_user_model(), list[str]()
        visible: Callable[[Any], QuerySet[Any]] = visible_approvals if notice.approval_id else visible_runs
        about = notice.approval_id or notice.run_id
        email = getattr(users, "get_email_field_name", str)()  # "" if users have none
        for address in people:  # that no user has, or whose user may see the approval or run
            owners = [*users._default_manager.filter(**{f"{email}__iexact": address})] if email else []
            if not owners or any(visible(owner).filter(pk=about).exists() for owner in owners):
                readers.append(address)
        if readers:
            subject, body = self.text(notice, None)  # before the lane, in this thread's language
            _lane(lambda: send_mail(subject, body, None, readers), TIMEOUT)

    def text(self, notice: Notice, person: Any) -> tuple[str, str]:
        """Build the subject and the body of a mail to a user; `person` is None for a list of addresses."""
        what = {
            "approval.requested": _("Approval needed"),
            "run.orphaned": _("A call is in doubt"),
            "run.paused": _("A run is paused"),
            "run.blocked": _("Runs are blocked"),
            "budget.low": _("A budget is nearly used up"),
        }.get(notice.type, notice.type)
        # On one line, because a line break, which a model may write, would begin another header.
        title = one_line(notice.title or notice.tool or notice.agent, 110)
        subject = f"[agentruns] {what}: {characters.isolated(title)}"
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
        shown = [f"{label}: {characters.isolated(one_line(value))}" for label, value in lines if value]
        return subject, "\n".join([subject, "", *shown, ""])

    def check(self) -> Iterator[CheckMessage]:
        """Yield an Error if the setting has no list of addresses, and a Warning if SMTP has no time-out."""
        people = settings.NOTIFY_EMAILS
        if not people or not isinstance(people, list | tuple):
            hint = "AGENTRUNS_NOTIFY_EMAILS = ['support@example.org'], or remove the mail notifier."
            yield Error(MISSING, hint=hint, id="agentruns.E011")
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
