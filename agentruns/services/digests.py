"""Digests: one mail a day to each person for whom approvals wait."""

from __future__ import annotations

from contextlib import suppress

from django.core.mail import send_mail
from django.db.models import Count, Min
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext

from agentruns.conf import settings
from agentruns.journal.policy import ACTIONS, staff, visible_approvals
from agentruns.models import Approval, StartCount
from agentruns.models.statuses import PENDING
from agentruns.services.permissions import decidable_by
from agentruns.services.recipients import address_of
from agentruns.utils import clock
from agentruns.utils.db import delete_rows
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.digests")


def send_digests() -> tuple[int, int]:
    """Mail the staff who may decide how many approvals wait; return how many mails were sent, and failed.

    A person gets at most one mail a day, by the project's time zone, and none if nothing waits.
    """
    alias, sent, failed = settings.DATABASE, 0, 0
    now = clock.now(alias)
    since_midnight = now - timezone.localtime(now).replace(hour=0, minute=0, second=0, microsecond=0)
    for person in filter(address_of, staff(ACTIONS["decide"][0])):
        key, (subject, body) = f"digest:{person.pk}", digest_of(person)
        if not subject or StartCount.count_one(alias, key, 1, since_midnight):
            continue
        try:
            send_mail(subject, body, None, [address_of(person)])
            sent += 1
        except Exception:  # of the mail server; the next call tries it again
            logger.exception("Digest not sent user=%s", person.pk)
            delete_rows(StartCount.objects.using(alias).filter(user_id=key))
            failed += 1
    return sent, failed


def digest_of(person: object) -> tuple[str, str]:
    """Build the subject and the body of a person's digest; ("", "") if nothing waits for the person."""
    waiting = decidable_by(person, visible_approvals(person).filter(status=PENDING)).order_by()
    counts = dict(waiting.values_list("risk").annotate(Count("pk")))
    if not (number := sum(counts.values())):
        return "", ""
    text = ngettext("%(count)d approval waits for you", "%(count)d approvals wait for you", number)
    oldest = timezone.localtime(waiting.aggregate(at=Min("requested_at"))["at"])
    lines = [f"{_('Risk')} {label}: {counts.get(risk, 0)}" for risk, label in reversed(Approval.Risk.choices)]
    lines.append(_("The oldest waits since %(time)s.") % {"time": f"{oldest:%Y-%m-%d %H:%M %Z}"})
    with suppress(NoReverseMatch):  # in a project without the admin
        url = f"{settings.BASE_URL.rstrip('/')}{reverse('admin:agentruns_approval_changelist')}?mine=yes"
        lines += [f"{_('Open it here')}: {url}"] if settings.BASE_URL else []
    subject = f"[agentruns] {text % {'count': number}}"
    return subject, "\n".join([subject, "", *lines, ""])
