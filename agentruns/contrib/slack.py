"""Approvals in Slack: set AGENTRUNS_NOTIFIERS = ["agentruns.contrib.slack.SlackNotifier"].

A message has the facts of a mail. Its buttons decide through the same service as the console, in the name of
the Django user whom AGENTRUNS_SLACK_USER finds. Texts of models stand in `rich_text` elements, in which Slack
reads neither mentions nor markup. The URL of presses: `path("slack/", include("agentruns.contrib.slack"))`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from importlib import import_module
from typing import Any

from django.core.checks import CheckMessage, Error
from django.db import connections
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.urls import NoReverseMatch, path, reverse
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from agentruns.conf import settings
from agentruns.contrib.mail import facts, headline
from agentruns.exceptions import AgentRunsError, PermissionDeniedError
from agentruns.journal.outbox import ASKING, Notice, notice_of
from agentruns.models import Approval, Notification
from agentruns.models.statuses import Verb
from agentruns.services.approvals import links
from agentruns.services.approvals.decisions import approve, deny, find_approval
from agentruns.tools.card import one_line
from agentruns.utils import characters, http, lanes
from agentruns.utils.redaction import get_logger, redact

logger = get_logger("agentruns.slack")

API = "https://slack.com/api/"
TIMEOUT = 5  # seconds for a whole delivery
PATIENCE = 1.4  # seconds for each of two answers to a press, which Slack gives up on after three
MOST = 256 * 1024  # bytes of a request or an answer of Slack
BOLD = {"bold": True}

_lane = lanes.Lane("agentruns-slack", 8)


class SlackNotifier:
    """The notifier that posts to a channel if a run needs a person. A subclass may set other `events`."""

    events: tuple[str, ...] = (*ASKING, "run.orphaned", "run.paused", "run.blocked")

    def __call__(self, notice: Notice) -> None:
        """Post the notice; nothing for an approval that is no longer pending, or without a channel.

        Raises OSError if Slack cannot be reached or refuses the message.
        """
        if not notice.is_settled and (channel := self.channel(notice)):
            call_slack("chat.postMessage", TIMEOUT, channel=channel, **message(notice))

    def channel(self, notice: Notice) -> str:
        """Choose the id of a notice's channel, by default AGENTRUNS_SLACK_CHANNEL; "" posts nothing."""
        return settings.SLACK_CHANNEL

    def check(self) -> Iterator[CheckMessage]:
        """Yield an Error for a setting that is missing to post, or to decide by a press of a button."""
        chooses = type(self).channel is not SlackNotifier.channel
        needed = {
            "AGENTRUNS_SLACK_TOKEN": settings.SLACK_TOKEN,
            "AGENTRUNS_SLACK_CHANNEL": settings.SLACK_CHANNEL or chooses,
            "AGENTRUNS_SLACK_SIGNING_SECRET": settings.SLACK_SIGNING_SECRET or not settings.SLACK_USER,
        }
        missing = ", ".join(name for name, value in needed.items() if not value)
        try:
            if settings.slack_user:
                import_module("slack_sdk.signature")
                reverse("agentruns_slack")
        except (ImportError, NoReverseMatch) as error:
            missing = str(error)
        if missing:
            hint = "docs/howto/slack.md: `pip install agentruns[slack]`, include('agentruns.contrib.slack')."
            yield Error(f"The Slack notifier needs more: {missing}", hint=hint, id="agentruns.E030")


def call_slack(method: str, seconds: float, **body: Any) -> None:
    """Call a method of Slack's Web API; raises OSError if Slack cannot be reached or refuses the call."""
    headers, data = {"Content-Type": "application/json; charset=utf-8"}, json.dumps(body).encode()
    headers["Authorization"] = f"Bearer {settings.SLACK_TOKEN}"
    status, text = http.post(API + method, headers, data, lane=_lane, seconds=seconds, most=MOST)
    answer = {}
    with suppress(ValueError):  # no JSON
        answer = json.loads(text)
    if status != 200 or answer.get("ok") is not True:
        raise OSError(f"Slack refused {method}: {status} {one_line(str(answer.get('error', '')))}".strip())


def message(notice: Notice, outcome: str = "") -> dict[str, Any]:
    """Build a message: a notice's facts, with buttons or the `outcome` of a decision."""
    about, title = headline(notice), one_line(notice.title or notice.tool or notice.agent, 110)
    lines: list[dict[str, Any]] = []
    for label, value in facts(notice):
        if value != notice.url:  # of which there is a button
            lines += [_text(f"{label}: ", style=BOLD), _text(f"{characters.isolated(value)}\n")]
    lines += [_text(outcome, style=BOLD)] if outcome else []
    section = {"type": "rich_text_section", "elements": lines}
    blocks = [_text(_text(about, "plain_text"), "header"), {"type": "rich_text", "elements": [section]}]
    buttons = [] if outcome else _deciding(notice)
    if buttons:
        area = {"type": "plain_text_input", "action_id": "reason"}
        asked = {"optional": True, "label": _text(_("Reason"), "plain_text"), "element": area}
        blocks.append({"type": "input", "block_id": "reason", **asked})
    if notice.url:
        buttons.append(_button(_("Open"), "open", url=notice.url))
    blocks += [{"type": "actions", "elements": buttons}] if buttons else []
    text = escape(f"{about}: {characters.isolated(title)}", quote=False)  # of the notification on a phone
    return {"text": text, "blocks": blocks, "unfurl_links": False, "unfurl_media": False}


def _deciding(notice: Notice) -> list[dict[str, Any]]:
    """Build the buttons that decide a notice's approval; [] if only the console may decide it."""
    is_asked = notice.type in ASKING and settings.slack_user
    approval = find_approval(notice.approval_id or "") if is_asked else None
    if approval is None or not links.is_offered(approval, links.SLACK):
        return []
    link = links.sign(approval, links.SLACK)
    return [
        _button(_("Approve"), Verb.APPROVE, style="primary", value=link),
        _button(_("Deny"), Verb.DENY, style="danger", value=link),
    ]


def _button(label: str, action: str, **more: str) -> dict[str, Any]:
    return _text(_text(label, "plain_text"), "button", action_id=action, **more)


def _text(text: Any, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **more}


@csrf_exempt
@require_POST
def press_view(request: HttpRequest) -> HttpResponse:
    """Decide the approval whose button somebody pressed in Slack, and update the message.

    Answers 401 to a request that is longer than MOST, or without Slack's signature of the last five minutes.
    Without AGENTRUNS_SLACK_USER and AGENTRUNS_SLACK_SIGNING_SECRET there is no such page.
    """
    if not (settings.SLACK_SIGNING_SECRET and settings.slack_user):
        raise Http404
    from slack_sdk.signature import SignatureVerifier

    body, is_signed = request.read(MOST + 1), False
    with suppress(ValueError, TypeError):  # a header or a body that is no text or number
        verifier = SignatureVerifier(settings.SLACK_SIGNING_SECRET)
        is_signed = len(body) <= MOST and verifier.is_valid_request(body, dict(request.headers))
    if not is_signed:
        return HttpResponse(status=401)
    pressed = json.loads(QueryDict(body).get("payload", "{}"))
    for action in pressed.get("actions", ()):
        if action.get("action_id") in (Verb.APPROVE, Verb.DENY):
            _decide(pressed, action)
    return HttpResponse()


def _decide(pressed: dict[str, Any], action: dict[str, Any]) -> None:
    """Decide one approval and update its message; tell only the person why nothing was decided."""
    who, place, approval, refusal = pressed["user"], pressed["container"], None, ""
    reason = pressed.get("state", {}).get("values", {}).get("reason", {}).get("reason", {}).get("value") or ""
    user = settings.slack_user(who["id"], who.get("team_id", ""))
    try:
        if user is None:  # to the services None is the program itself, which may decide everything
            raise PermissionDeniedError(_("Your Slack user belongs to no user here."))
        approval, _nobody, is_current = links.follow(str(action.get("value")), links.SLACK)
        # The services check the person, the digest, and that the approval is pending and in time.
        if approval.status == Approval.Status.PENDING and not is_current:
            refusal = _("It has changed since this message. Look at it again.")
        elif is_current and not links.is_offered(approval, links.SLACK):
            refusal = _("This is decided in the console only. Open it there.")
        elif action["action_id"] == Verb.APPROVE:
            approve(approval.pk, user, digest=approval.digest, reason=reason, channel=links.SLACK)
        else:
            reason = reason or _("Denied in Slack, without a reason.")
            deny(approval.pk, user, reason, digest=approval.digest, channel=links.SLACK)
    except AgentRunsError as error:
        refusal = str(error)
    if refusal:
        text = escape(_("Nothing was decided. %(why)s") % {"why": refusal}, quote=False)
        _tell("chat.postEphemeral", channel=place["channel_id"], user=who["id"], text=text)
    if approval is not None:
        _tell("chat.update", channel=place["channel_id"], ts=place["message_ts"], **_message_now(approval))


def _message_now(approval: Approval) -> dict[str, Any]:
    """Build the message of an approval as it is now, with its outcome unless it is pending."""
    approval, outcome = find_approval(approval.pk), ""
    if approval.status != Approval.Status.PENDING:
        name = characters.isolated(one_line(redact(approval.decided_by_name))) or _("nobody")
        outcome = _("Closed (%(status)s), decided by %(name)s.")
        outcome %= {"status": approval.get_status_display(), "name": name}
    about = {"run_id": approval.run_id, "approval_id": approval.pk, "created_at": approval.requested_at}
    return message(notice_of(settings.DATABASE, Notification(event=ASKING[0], **about)), outcome)


def _tell(method: str, **body: Any) -> None:
    """Call Slack after a press; a failure is logged, because the decision is recorded in any case."""
    try:
        call_slack(method, PATIENCE, **body)
    except OSError as error:
        logger.warning("Slack was not told of a decision: %s", error)


view: Any = press_view  # marked for Django's and django-stronghold's middlewares that require a login
view.login_required, view.STRONGHOLD_IS_PUBLIC = False, True
# Slack is called while the view runs, which no transaction of ATOMIC_REQUESTS may wait for.
view._non_atomic_requests = {*connections}
urlpatterns = [path("", view, name="agentruns_slack")]
