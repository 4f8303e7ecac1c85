"""Statuses as labels in words; the colour only repeats what the word says."""

from __future__ import annotations

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.models import Approval, Run

TONES = {
    "queued": "plain",
    "running": "plain",
    "awaiting-approval": "waits",
    "orphaned": "bad",
    "paused": "waits",
    "completed": "good",
    "failed": "bad",
    "cancelled": "plain",
    "pending": "waits",
    "approved": "good",
    "consumed": "good",
    "answered": "good",
    "denied": "bad",
    "expired": "plain",
    "low": "plain",
    "normal": "plain",
    "high": "bad",
}


def run(run: Run) -> SafeString:
    """Return the status of a run."""
    return _badge(run.status, run.get_status_display())


def approval(approval: Approval) -> SafeString:
    """Return the status of an approval."""
    return _badge(approval.status, approval.get_status_display())


def risk(approval: Approval) -> SafeString:
    """Return the risk of an approval."""
    label = _("%(risk)s risk") % {"risk": approval.get_risk_display()}
    return _badge(approval.risk, label)


def _badge(value: str, label: str) -> SafeString:
    tone = TONES.get(value, "plain")
    return format_html('<span class="ar-badge ar-tone--{}">{}</span>', tone, label)
