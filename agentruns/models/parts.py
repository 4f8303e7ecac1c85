"""The two parts of a row: facts, which the fold needs and nobody erases, and content, which can be erased.

Each part has a hash with a random salt of its own, its commitment. Without the salt nobody can guess the
text, so whoever hides a part hides its salt. The chain is made of the commitments and still verifies.
"""

from __future__ import annotations

import hashlib
import hmac
from copy import deepcopy
from typing import Any

ERASED = "[erased]"
HAS = "has"  # fact: which optional members the content has, so that an erased row still tells
COMMON = {"v", "copied", HAS}  # facts of every kind

Payload = dict[str, Any]


class Form:
    """The facts among a payload's members, and the neutral values that replace erased content.

    `content` and `optional` map members to their neutral values. `gone` are members that an erased row lacks.
    `inside` maps members that are objects, or lists of objects, to the forms by which they are split.
    """

    def __init__(
        self,
        facts: str = "",
        content: Payload | None = None,
        optional: Payload | None = None,
        gone: str = "",
        **inside: Form,
    ) -> None:
        self.facts = COMMON | set(facts.split())
        self.content = content or {}
        self.optional = optional or {}
        self.gone = set(gone.split())
        self.inside = inside

    def split(self, payload: Payload) -> tuple[Payload, Payload]:
        """Split a payload into facts and content; members unknown to this form are content."""
        facts: Payload = {}
        content: Payload = {}
        for name, value in payload.items():
            form = self.inside.get(name)
            if name in self.facts:
                facts[name] = value
            elif form is not None and isinstance(value, list):
                pairs = [form.split(item) for item in value]
                facts[name], content[name] = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            elif form is not None and isinstance(value, dict):
                facts[name], content[name] = form.split(value)
            else:
                content[name] = value
        if has := sorted(self.optional.keys() & content.keys()):
            facts[HAS] = has
        return facts, content

    def neutral(self, facts: Payload) -> Payload:
        """Build the neutral content that replaces an erased content, with the members that `facts` names."""
        content: Payload = deepcopy(self.content)
        has = self.optional.keys() & {*facts.get(HAS, ())}
        content |= {name: deepcopy(self.optional[name]) for name in sorted(has)}
        for name, form in self.inside.items():
            value = facts.get(name)
            if isinstance(value, list):
                content[name] = [form.neutral(item) for item in value]
            elif isinstance(value, dict):
                content[name] = form.neutral(value)
        return content


_TEXT_BLOCKS = [{"type": "text", "text": ERASED}]
_ERROR = Form("type", {"text": ERASED})
_REASON: Payload = {"reason": ERASED}
_EDIT: Payload = {"arguments": {}, "edited": {}, "title": ERASED, "preview": None}
_RAISED: Payload = {"raised": ERASED}

# By kind; the members are described in journal.events.
FORMS: dict[str, Form] = {
    "run_started": Form(
        "agent version definition session scope actor owner requesters idempotency_key origin tools"
        " not_before task",
        optional={"context": {}, "instructions": ERASED},
        gone="stored",
    ),
    "user": Form("reason actor idempotency_key", {"content": _TEXT_BLOCKS}, gone="stored"),
    "assistant": Form(
        "stop_reason model request_id read usage cost fallback",
        gone="content left_out sent",  # `merged` rebuilds its content
        calls=Form("id provider_id tool digest parallel verdict", {"arguments": {}}, gone="original"),
    ),
    "model_failed": Form("attempt code status request_id retry_in usage cost fallback", error=_ERROR),
    "approval_requested": Form(
        "approval digest risk approvers required expires_at only_answers settles origin",
        {"arguments": {}, "title": ERASED, "why": ERASED, "preview": None},
    ),
    "approval_decided": Form(
        "verb digest actor channel settles", optional={**_REASON, "text": ERASED, **_EDIT}
    ),
    "approval_extended": Form("from expires_at actor channel", _REASON),
    "approval_voided": Form("approval voided", {"why": ERASED}),
    "tool_started": Form("key digest declares timeout approval approved_by"),
    "tool_result": Form(
        "is_error outcome stringified reconciled duration_ms in_doubt actor open_in",
        {"content": ERASED},
        _RAISED,
        gone="stored misfit edited",
    ),
    "late_result": Form(
        "worker_epoch is_error never_entered stringified reconciled lost",
        optional={**_RAISED, "content": ERASED},
        gone="stored misfit",
    ),
    "orphan_found": Form("action declares started_at", {"evidence": ERASED}, _RAISED),
    "orphan_resolved": Form(
        "verdict actor channel", optional={**_REASON, "evidence": ERASED, "result": ERASED}
    ),
    "run_resumed": Form("actor epoch unpause", _REASON),
    "run_pause_requested": Form("actor", _REASON),
    "run_paused": Form("actor restored", _REASON),
    "run_cancel_requested": Form("actor", _REASON),
    "run_adopted": Form("actor old new version tools", _REASON, {"instructions": ERASED}, gone="stored"),
    "run_completed": Form("truncated", {"output": ERASED}),
    "run_failed": Form(error=_ERROR),
    "run_cancelled": Form("actor", _REASON),
    "payload_erased": Form("seq actor file", _REASON),
}
_UNKNOWN = Form()


def facts_of(kind: str) -> set[str]:
    """List the members of a payload that are facts, which hold no text to mask or erase."""
    return FORMS.get(kind, _UNKNOWN).facts


def split(kind: str, payload: Payload) -> tuple[Payload, Payload]:
    """Split a row's payload into its facts and its content."""
    return FORMS.get(kind, _UNKNOWN).split(payload)


def merged(kind: str, facts: Payload, content: Payload | None) -> Payload:
    """Join facts and content to a payload; neutral values replace content that was erased."""
    if content is None:
        content = FORMS.get(kind, _UNKNOWN).neutral(facts)
        if kind == "assistant":  # a provider requires the call of every result
            used = [
                {"type": "tool_use", "id": call["provider_id"], "name": call["tool"], "input": {}}
                for call in facts["calls"]
            ]
            content["content"] = used or deepcopy(_TEXT_BLOCKS)
    payload = _joined(facts, content) if content else {**facts}
    payload.pop(HAS, None)
    return payload


def _joined(facts: Payload, content: Payload) -> Payload:
    payload = {**facts}
    for name, value in content.items():
        fact = payload.get(name)
        if isinstance(fact, dict) and isinstance(value, dict):
            payload[name] = _joined(fact, value)
        elif isinstance(fact, list) and isinstance(value, list):
            payload[name] = [_joined(*pair) for pair in zip(fact, value, strict=True)]
        else:
            payload[name] = value
    return payload


def commitment(salt: str, text: str) -> str:
    """Compute the hash of a part's salt and canonical text, which the chain contains."""
    return hashlib.sha256(bytes.fromhex(salt) + text.encode()).hexdigest()


def keyed(key: str, text: str) -> str:
    """Compute the HMAC-SHA256 of a text, in hex; `key` in hex."""
    return hmac.digest(bytes.fromhex(key), text.encode(), "sha256").hex()
