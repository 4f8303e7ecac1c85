"""What a notifier is called with: an event, what it is about, and never a call's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.urls import NoReverseMatch, reverse

from agentruns import canonical
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.models import Approval, Message, Notification, Run
from agentruns.redaction import redact
from agentruns.tools.card import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One event, and how things stand now: `status` is the approval's for `approval.` events, else the run's.

    The `id` is the same at every attempt, for the receiver to tell a repetition by.
    """

    id: UUID
    type: str
    timestamp: datetime
    run_id: UUID
    session: str
    agent: str
    status: str
    requester: str
    approval_id: UUID | None
    title: str
    tool: str
    risk: str
    expires_at: datetime | None
    url: str

    def payload(self) -> dict[str, Any]:
        """Return the event as a webhook carries it: what it is about, never the arguments."""
        data = {
            "run_id": str(self.run_id),
            "session": self.session,
            "agent": self.agent,
            "status": self.status,
            "approval_id": str(self.approval_id) if self.approval_id else None,
            "title": self.title or None,
            "tool": self.tool or None,
            "risk": self.risk or None,
            "expires_at": _iso(self.expires_at) if self.expires_at else None,
        }
        if self.url:
            data["url"] = self.url
        return {"type": self.type, "timestamp": _iso(self.timestamp), "data": data}


def notice_of(alias: str, notification: Notification) -> Notice:
    """Read what a notification is about."""
    key, agent, status, requester = (
        Run.objects.using(alias)
        .values_list("session__key", "agent", "status", "owner_name")
        .get(pk=notification.run_id)
    )
    title, tool, risk, expires_at = "", "", "", None
    if notification.approval_id:
        status, title, tool, risk, expires_at = (
            Approval.objects.using(alias)
            .values_list("status", "title", "tool_name", "risk", "expires_at")
            .get(pk=notification.approval_id)
        )
    elif notification.event == "run.orphaned":
        tool = _held_tool(alias, notification.run_id)
    return Notice(
        id=notification.pk,
        type=notification.event,
        timestamp=notification.created_at,
        run_id=notification.run_id,
        session=key,
        agent=agent,
        status=status,
        requester=requester,
        approval_id=notification.approval_id,
        title=_shown(title, tool) if notification.approval_id else "",
        tool=tool,
        risk=risk,
        expires_at=expires_at,
        url=_url(notification),
    )


def _held_tool(alias: str, run_id: UUID) -> str:
    rows = Message.objects.using(alias).filter(run_id=run_id, kind=events.ORPHAN_FOUND).order_by("-seq")
    found = rows.values_list("tool_name", "payload")
    return next((tool for tool, payload in found if payload["action"] == "held"), "")


def _shown(title: str, tool: str) -> str:
    # The title of a tool without `describe` is its arguments, and those stay inside.
    if not title or title.startswith(f"{tool}("):
        return tool
    return str(canonical.legal(one_line(redact(title))))


def _url(notification: Notification) -> str:
    base = settings.BASE_URL.rstrip("/")
    if not base:
        return ""
    model, pk = "run", notification.run_id
    if notification.approval_id:
        model, pk = "approval", notification.approval_id
    try:
        return base + reverse(f"admin:agentruns_{model}_change", args=[pk])
    except NoReverseMatch:
        return ""


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
