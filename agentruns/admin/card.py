"""What is on the card of an approval: everything a person needs to decide, and who may."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from django.forms import Form
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges, decisions, facts, outlook, waiting
from agentruns.admin.asked import Asked, asked
from agentruns.admin.edit import EditForm
from agentruns.admin.forms import AnswerForm, ApproveForm, DenyForm, ExtendForm
from agentruns.admin.journal import card
from agentruns.admin.precedents import Flag, flags, precedents
from agentruns.admin.preview import preview
from agentruns.admin.text import Body, arguments, plain, visible
from agentruns.admin.times import dated, is_urgent
from agentruns.agents.agent import get_agent
from agentruns.conf import settings
from agentruns.exceptions import UnknownAgentError
from agentruns.journal.masking import Sensitive, masked, sensitive_in
from agentruns.models import Approval
from agentruns.services import permissions
from agentruns.tools import Tool
from agentruns.tools.card import MASK
from agentruns.utils import json as canonical
from agentruns.utils.db import always_rollback
from agentruns.utils.redaction import redact, redacted

CHANGED = gettext_lazy("What the preview shows has changed since the agent asked. This is how it is now.")
GONE = gettext_lazy("The preview cannot be made any more: it shows how things were when the agent asked.")


@dataclass(slots=True)
class Decidable:
    """One approval and what this user may do about it."""

    approval: Approval
    user: Any
    asked: Asked
    tool: Tool | None
    sensitive: Sensitive
    revealed: bool = False

    @property
    def pending(self) -> bool:
        """Whether it still waits."""
        return self.approval.status == Approval.Status.PENDING

    @property
    def masked_names(self) -> set[str]:
        """The arguments of which the page shows a mask: sensitive, and not revealed."""
        if self.revealed:
            return set()
        return set(self.sensitive.get(self.approval.tool_name, ())) & set(self.approval.arguments)

    @property
    def locked_names(self) -> set[str]:
        """The arguments that cannot be edited, because the page does not show them as they are."""
        given = self.approval.arguments
        return self.masked_names | {name for name, value in given.items() if _is_redacted(value)}

    def shown(self, values: dict[str, Any]) -> list[Body]:
        """Return arguments for the page."""
        hidden = self.masked_names
        return arguments({name: MASK if name in hidden else value for name, value in values.items()})

    @property
    def why_not(self) -> str:
        """Why there are no buttons for this user on a pending card, or ""."""
        approval = self.approval
        if not self.pending:
            return ""
        if approval.expires_at is not None and approval.expires_at <= timezone.now():
            return _("Its time is over. The next sweep of a worker records that nobody answered.")
        if waiting.cancel_request(settings.DATABASE, approval.run) is not None:
            return _("Its run is being cancelled.")
        return plain(permissions.why_not_decide(self.user, approval))

    @property
    def why_not_approve(self) -> str:
        """Why this user can do everything but approve, or ""."""
        if permissions.already_given(self.user, [self.approval]):
            return _("You approved it already. It takes another person. You can still change your mind.")
        return ""

    @property
    def why_not_edit(self) -> str:
        """Why the arguments cannot be edited here, or ""."""
        if self.tool is None:
            return _("This web server does not know the tool as the run does, so it could not check an edit.")
        return "" if self.approval.arguments else _("The call takes no arguments.")

    def form(self, verb: str, data: Any = None) -> Form | None:
        """Return the form of a verb, or None where there is none."""
        expires = self.approval.expires_at
        initial = {"digest": self.approval.digest, "seen": expires.isoformat() if expires else ""}
        auto_id = f"{verb}_%s"
        if verb == "edit":
            if self.why_not_edit or self.tool is None:
                return None
            return EditForm(
                self.tool.input_schema,
                self.approval.arguments,
                data,
                hidden=self.locked_names,
                initial=initial,
                auto_id=auto_id,
            )
        forms: dict[str, type[Form]] = {
            "approve": ApproveForm,
            "deny": DenyForm,
            "answer": AnswerForm,
            "extend": ExtendForm,
        }
        return forms[verb](data, initial=initial, auto_id=auto_id)


def decidable(user: Any, approval: Approval, *, revealed: bool = False) -> Decidable:
    """Read what is needed to show and to decide an approval."""
    around, sensitive = asked(settings.DATABASE, approval), sensitive_in(approval.run)
    return Decidable(approval, user, around, _tool(approval), sensitive, revealed)


def sections(one: Decidable, approvals: Any) -> dict[str, Any]:
    """Return the context of the card but for its URLs; `approvals` are those that its reader may see."""
    approval, around = one.approval, one.asked
    summary, denials = precedents(approvals, approval)
    warnings = flags(settings.DATABASE, approval) if one.pending else []
    shown = _preview(one, warnings)
    sensitive = {} if one.revealed else one.sensitive
    question = around.only_answers
    return {
        "why": visible(approval.why),
        "asked_for": visible(approval.run.owner_name or _("the program")),
        "expires": dated(approval.expires_at) if approval.expires_at else "",
        "urgent": is_urgent(approval.requested_at, approval.expires_at),
        "badge": badges.approval(approval),
        "risk": badges.risk(approval),
        "pending": one.pending,
        "outcome": decisions.outcome(approval),
        "arguments": one.shown(approval.arguments),
        "changed": _changed(one),
        "preview": preview(shown, one.masked_names),
        "flags": warnings,
        "precedents": summary,
        "denials": denials,
        "said": visible(around.said),
        "siblings": around.siblings,
        "question": question,
        "choices": _choices(approval) if question else [],
        "outlooks": outlook.of_a_question(approval) if question else outlook.outlooks(approval),
        "history": [card(masked(row, sensitive), whole=True) for row in around.history],
        "facts": facts.of_approval(approval),
        "masked": bool(one.masked_names),
        "may_reveal": one.user.has_perm("agentruns.reveal_arguments"),
        "revealed": one.revealed,
    }


def buttons(one: Decidable) -> dict[str, Any]:
    """Return the forms of a pending card, or why there are none."""
    why_not = one.why_not
    if not one.pending or why_not:
        return {"why_not": why_not}
    verbs = ["answer", "deny"] if one.asked.only_answers else ["approve", "edit", "answer", "deny"]
    if one.approval.expires_at is not None:
        verbs.append("extend")
    return {
        "why_not": "",
        "why_not_approve": one.why_not_approve,
        "why_not_edit": one.why_not_edit,
        **{f"{verb}_form": one.form(verb) for verb in verbs},
    }


def _preview(one: Decidable, warnings: list[Flag]) -> Any:
    """Return the preview to show: of a pending card the one made now, and a warning if it differs."""
    shown = one.asked.preview
    if one.tool is None or one.tool.preview is None or not one.pending:
        return shown
    with always_rollback():
        now = one.tool.preview_of(one.approval.arguments)
    if now is None and shown is not None:
        warnings.append(Flag(GONE))
    elif now is not None and canonical.dumps(now) != canonical.dumps(shown):
        warnings.append(Flag(CHANGED))
        return now
    return shown


def _is_redacted(value: Any) -> bool:
    texts = (str(value), json.dumps(value, ensure_ascii=False, default=str))
    return redacted(value) != value or any(redact(text) != text for text in texts)


def _changed(one: Decidable) -> list[Body]:
    """Return the arguments as the model proposed them, where a person set others."""
    given, proposed = one.approval.arguments, one.asked.proposed
    return one.shown({name: value for name, value in proposed.items() if given.get(name) != value})


def _choices(approval: Approval) -> list[str]:
    choices = approval.arguments.get("choices")
    return [plain(choice) for choice in choices] if isinstance(choices, list) else []


def _tool(approval: Approval) -> Tool | None:
    try:
        agent = get_agent(approval.run.agent, approval.run.version)
    except UnknownAgentError:
        return None
    same = agent.definition_hash == approval.run.definition_id  # else it is another tool of that name
    return agent.tools.get(approval.tool_name) if same else None
