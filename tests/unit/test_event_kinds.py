"""Every table that goes by the kind of a journal row knows each kind, or says here why it does not.

A new kind fails these tests until each table has decided about it, and about each member of its payload:
facts and content add up to the payload again.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NotRequired, get_origin, get_type_hints, is_typeddict
from uuid import UUID

import pytest

from agentruns.journal import conversation, events, fold, outbox, telemetry
from agentruns.journal.masking import Mask
from agentruns.models.kinds import form_of, merged, split
from agentruns.models.parts import ERASED, Form

ROOT = Path(__file__).parents[2]
COMMON = form_of("of newer code").facts
CONSTANTS = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
KINDS = CONSTANTS - {events.COPIED, events.OUTPUT_INVALID, events.MESSAGE}
# Each kind has its form, a TypedDict of its name.
PAYLOADS = {kind: getattr(events, kind.title().replace("_", "")) for kind in sorted(KINDS)}
NESTED = {"calls": events.AskedCall, "error": events.Error, "about": events.About}

# Kind -> members that can be erased. Listed, not read from the annotations: decide about each new member.
CONTENT: dict[str, set[str]] = {
    events.RUN_STARTED: {"context", "idempotency_key", "instructions", "stored"},
    events.USER: {"about", "content", "idempotency_key", "stored"},
    events.ASSISTANT: {"calls", "content", "left_out", "sent"},
    events.MODEL_FAILED: {"error"},
    events.APPROVAL_REQUESTED: {"arguments", "holds", "preview", "title", "why"},
    events.APPROVAL_DECIDED: {"arguments", "edited", "holds", "preview", "reason", "text", "title"},
    events.APPROVAL_EXTENDED: {"reason"},
    events.APPROVAL_VOIDED: {"why", "asks", "holds"},
    events.APPROVAL_REMINDED: set(),
    events.APPROVAL_ESCALATED: set(),
    events.TOOL_STARTED: set(),
    events.EVENT_AWAITED: set(),
    events.EVENT_DELIVERED: set(),
    events.TOOL_RESULT: {"content", "edited", "misfit", "raised", "stored"},
    events.LATE_RESULT: {"content", "misfit", "raised", "stored"},
    events.ORPHAN_FOUND: {"evidence", "raised"},
    events.ORPHAN_RESOLVED: {"evidence", "reason", "result"},
    events.RUN_RESUMED: {"reason"},
    events.RUN_PAUSE_REQUESTED: {"reason"},
    events.RUN_PAUSED: {"reason"},
    events.RUN_CANCEL_REQUESTED: {"reason"},
    events.RUN_ADOPTED: {"instructions", "reason", "stored"},
    events.RUN_COMPLETED: {"output"},
    events.RUN_FAILED: {"error"},
    events.RUN_CANCELLED: {"reason"},
    events.PAYLOAD_ERASED: {"reason"},
    events.LEFT_OUT: {"reason"},
    events.BUDGET_LOW: set(),
    events.BUDGET_RAISED: {"reason"},
}

# Listed, not computed from KINDS: a new kind has to be put somewhere.
OF_A_RUN = {
    events.RUN_STARTED, events.USER, events.ASSISTANT, events.MODEL_FAILED, events.RUN_RESUMED,
    events.RUN_PAUSE_REQUESTED, events.RUN_PAUSED, events.RUN_CANCEL_REQUESTED, events.RUN_ADOPTED,
    events.PAYLOAD_ERASED, events.LEFT_OUT, events.BUDGET_LOW, events.BUDGET_RAISED,
}  # fmt: skip
ENDS = {events.RUN_COMPLETED, events.RUN_FAILED, events.RUN_CANCELLED}
OF_A_CALL = {
    events.APPROVAL_REQUESTED, events.APPROVAL_DECIDED, events.APPROVAL_EXTENDED, events.APPROVAL_VOIDED,
    events.TOOL_STARTED, events.TOOL_RESULT, events.LATE_RESULT, events.ORPHAN_FOUND, events.ORPHAN_RESOLVED,
    events.EVENT_AWAITED, events.EVENT_DELIVERED, events.APPROVAL_REMINDED, events.APPROVAL_ESCALATED,
}  # fmt: skip
TELLING = (events.APPROVAL_REMINDED, events.APPROVAL_ESCALATED)


def because(reason: str, *kinds: str) -> dict[str, str]:
    """Give each kind a reason."""
    return dict.fromkeys(kinds, reason)


ABOUT_THE_RUN = because("is about the run, not about one call", *ENDS, *OF_A_RUN)

# Module and name of each table -> the kinds that it leaves out, and why.
TABLES: dict[str, dict[str, str]] = {
    "agentruns.journal.events:CLOSING": because("the run goes on", *OF_A_CALL, *OF_A_RUN),
    "agentruns.journal.batch:PROGRESS": because(
        "a worker that crashes each time gets as far",
        *OF_A_CALL - {events.TOOL_RESULT, events.EVENT_AWAITED},
        *ENDS | OF_A_RUN - {events.ASSISTANT},
    ),
    "agentruns.journal.doubts:KINDS": {
        **because("is about the run, not about one call", *ENDS, *OF_A_RUN - {events.USER}),
        **because("leaves open whether the call happened", events.TOOL_STARTED, events.LATE_RESULT),
        **because("asks people", events.APPROVAL_REQUESTED, events.APPROVAL_EXTENDED, events.ORPHAN_FOUND),
        **because("asks people again", *TELLING),
        **because("the call's result says the rest", events.EVENT_AWAITED, events.EVENT_DELIVERED),
    },
    "agentruns.journal.payloads:OF_BLOCKS": because(
        "has no blocks with files",
        *OF_A_CALL - {events.TOOL_RESULT, events.LATE_RESULT} | ENDS | OF_A_RUN - {events.USER},
    ),
    "agentruns.journal.fold:_APPLY": {
        **because("the next row has the result", events.EVENT_DELIVERED),
        **because("changes what other rows say, and no state", events.PAYLOAD_ERASED, events.LEFT_OUT),
    },
    "agentruns.journal.conversation:_APPLY": {
        **because("the model is not told", *ENDS | OF_A_RUN - {events.USER, events.ASSISTANT}),
        **because("it changes what earlier rows say", events.LEFT_OUT),
        **because("the model sees the result that the call has in the end", *OF_A_CALL - {"tool_result"}),
    },
    "agentruns.journal.verify:_PAIRED": {
        **ABOUT_THE_RUN,
        **because("the expiry it sets is compared with the column", events.APPROVAL_EXTENDED),
        **because("what is due after it is compared with the column", *TELLING),
    },
    "agentruns.journal.read:NAMING": because(
        "names no definition", *OF_A_CALL | ENDS | OF_A_RUN - {events.RUN_STARTED, events.RUN_ADOPTED}
    ),
    "agentruns.journal.telemetry:EVENT_ATTRIBUTES": {
        **because(
            "the drive's span says it",
            *(events.RUN_STARTED, events.USER, events.RUN_RESUMED, events.RUN_PAUSED, events.RUN_ADOPTED),
            *(events.LEFT_OUT, events.BUDGET_RAISED),
        ),
        **because("the costs of the requests are counted", events.BUDGET_LOW),
        **because("the request's span says it", events.ASSISTANT, events.MODEL_FAILED),
        **because("the tool's span says it", events.TOOL_STARTED, events.TOOL_RESULT),
        **because("no drive and no tool is at work", events.EVENT_AWAITED, events.EVENT_DELIVERED),
        **because("the decision is counted", events.APPROVAL_REQUESTED, events.APPROVAL_EXTENDED, *TELLING),
        **because("the decision that takes its place is counted", events.APPROVAL_VOIDED),
        **because("the run's end is counted", events.RUN_CANCEL_REQUESTED),
        **because("the drive that it stops has a span", events.RUN_PAUSE_REQUESTED),
        **because("may come years after the drives", events.PAYLOAD_ERASED),
    },
    "agentruns.journal.outbox:EVENTS": {
        **because(
            "whoever did it knows, and nobody has to act",
            *(events.RUN_STARTED, events.USER, events.RUN_RESUMED, events.RUN_PAUSE_REQUESTED),
            *(events.RUN_CANCEL_REQUESTED, events.RUN_ADOPTED, events.APPROVAL_EXTENDED),
            *(events.ORPHAN_RESOLVED, events.PAYLOAD_ERASED, events.LEFT_OUT, events.BUDGET_RAISED),
        ),
        **because(
            "a step of the run that asks nobody for anything",
            *(events.ASSISTANT, events.MODEL_FAILED, events.TOOL_STARTED, events.TOOL_RESULT),
            *(events.LATE_RESULT, events.EVENT_AWAITED, events.EVENT_DELIVERED),
        ),
    },
    "agentruns.admin.runs.steps:FORMS": {},
    "agentruns.admin.runs.calls:_FOLDED": {
        **ABOUT_THE_RUN,
        **because("says nothing about what became of the call", events.APPROVAL_EXTENDED, *TELLING),
    },
    "agentruns.admin.approvals.card:HISTORY": {
        **ABOUT_THE_RUN,
        **because("is the card itself, above its history", events.APPROVAL_REQUESTED),
    },
    "agentruns.management.timeline:_SAYS": because(
        "its payload is as short as any sentence", events.APPROVAL_EXTENDED, events.APPROVAL_REMINDED
    ),
}

# Kind -> keys of its payload that hold arguments of a tool, which are masked; other kinds hold none.
ARGUMENTS = {
    events.ASSISTANT: {"content", "calls"}, events.APPROVAL_REQUESTED: {"arguments"},
    events.APPROVAL_DECIDED: {"arguments", "edited"}, events.TOOL_RESULT: {"edited"},
}  # fmt: skip


def test_the_kinds_are_those_of_the_payloads() -> None:
    forms = {form for name, form in vars(events).items() if is_typeddict(form) and not name.startswith("_")}
    bases = [events.Payload, events.ResultFacts]
    assert {form for form in forms.difference(bases) if "v" in get_type_hints(form)} == {*PAYLOADS.values()}


@pytest.mark.parametrize("path", TABLES)
def test_each_table_knows_each_kind_or_says_why_not(path: str) -> None:
    module, _, name = path.partition(":")
    table, left_out = set(getattr(import_module(module), name)), TABLES[path]
    assert table | set(left_out) == KINDS, "decide about the kinds that are missing"
    assert table.isdisjoint(left_out), "no reason is left for these"
    assert all(left_out.values())


@pytest.mark.parametrize("module", [fold, conversation])
def test_each_handler_takes_the_payload_of_its_kind(module: Any) -> None:
    for kind, handler in module._APPLY.items():
        assert get_type_hints(handler)["payload"] is PAYLOADS[kind], kind


@pytest.mark.parametrize("kind", PAYLOADS)
def test_sensitive_arguments_are_masked_in_every_kind(kind: str) -> None:
    named, secret = ARGUMENTS.get(kind, set()), {"card": "4111-1111"}
    assert named >= keys_of(kind) & {"arguments", "edited", "calls"}, "decide what is masked of it"
    payload = {**dict.fromkeys(keys_of(kind), "-"), **dict.fromkeys(named, secret)}
    if kind == events.ASSISTANT:
        payload["calls"] = [{"tool": "pay", "arguments": secret, "original": {"input": secret}}]
        payload["content"] = [{"type": "tool_use", "name": "pay", "input": secret}]
    shown = Mask([{"tools": {"pay": {"sensitive": ["card"]}}}]).row(row_of(kind, payload)).payload
    assert set(shown) == set(payload) - {"key_hash"}
    assert secret["card"] not in json.dumps(shown)


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_row_that_a_fork_copied_is_no_part_of_its_own_life(kind: str) -> None:
    row, state = row_of(kind, {"copied": {"run": "of another", "seq": 1}}), fold.RunState(UUID(int=1))
    state.apply(row)
    assert state == fold.RunState(UUID(int=1), seq=1)
    batch: Any = SimpleNamespace(rows=[row], state=SimpleNamespace(run=state))
    assert not telemetry._report(row, "agent")
    assert not outbox._events(batch)


def test_recorded_journals_have_these_payloads() -> None:
    rows = [
        (line["kind"], merged(line["kind"], json.loads(line["facts"]), json.loads(line["content"])))
        for path in (ROOT / "fixtures/releases").glob("*/*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line.get("content")
    ]
    assert rows
    for kind, payload in rows:
        assert required_of(kind) <= set(payload) <= keys_of(kind), kind


@pytest.mark.parametrize("kind", PAYLOADS)
def test_the_reference_names_every_key(kind: str) -> None:
    page = (ROOT / "docs/reference/events.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"| `{kind}` |"))
    optional = set(re.findall(r"\*`(\w+)`\*", line))
    assert optional == keys_of(kind) - required_of(kind) - {"v", "copied"}, "in italics"
    assert required_of(kind) <= set(re.findall(r"`(\w+)`", line.split("|")[3])) - optional
    assert set(re.findall(r"^\| `(\w+)` \| [^|]* \| .* \|$", page, re.MULTILINE)) == KINDS
    sentence = page.partition("Each of `calls` has")[2].partition("\n\n")[0]
    assert set(members(events.AskedCall)) <= set(re.findall(r"`(\w+)`", sentence))


def row_of(kind: str, payload: dict[str, Any]) -> events.Row:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return events.Row(1, UUID(int=1), kind, "c", "pay", 1, 1, payload, at, "", "", None)


def keys_of(kind: str) -> set[str]:
    return set(get_type_hints(PAYLOADS[kind]))


def required_of(kind: str) -> set[str]:
    return {name for name, always in members(PAYLOADS[kind]).items() if always}


def members(payload: type) -> dict[str, bool]:
    """List the members of a payload, and whether each is always there."""
    hints = get_type_hints(payload, include_extras=True)
    return {name: get_origin(hint) is not NotRequired for name, hint in hints.items() if name not in COMMON}


def decided(form: Form) -> list[str]:
    return [*form.facts - COMMON, *form.content, *form.optional, *form.gone, *form.inside]


@pytest.mark.parametrize("kind", PAYLOADS)
def test_every_member_is_a_fact_or_content(kind: str) -> None:
    form, payload = form_of(kind), PAYLOADS[kind]
    assert sorted(decided(form)) == sorted(members(payload))
    assert {*form.content, *form.optional, *form.gone, *form.inside} == CONTENT[kind], (
        "decide whether it can be erased"
    )
    for name, inside in form.inside.items():
        assert sorted(decided(inside)) == sorted(members(NESTED[name]))
    assert all(members(payload)[name] for name in form.content), "what an erased row always has"
    assert not any(members(payload)[name] for name in form.optional)
    assert {each: each.payload for each in events.KINDS.values()} == PAYLOADS


def whole(kind: str) -> dict[str, Any]:
    """Build a payload of a kind with every member."""
    payload = {name: f"the {name}" for name in [*members(PAYLOADS[kind]), "v", "newer"]}
    for name in form_of(kind).inside:
        one = {member: f"the {member}" for member in members(NESTED[name])}
        payload[name] = [one, {**one, "newer": 1}] if name == "calls" else one  # type: ignore[assignment]
    return payload


@pytest.mark.parametrize("kind", PAYLOADS)
def test_the_parts_add_up_and_an_erased_row_has_the_members_that_readers_count_on(kind: str) -> None:
    payload = whole(kind)
    facts, content = split(kind, payload)
    assert content and merged(kind, facts, content) == payload
    left = merged(kind, facts, None)
    assert required_of(kind) - form_of(kind).gone <= set(left) <= set(payload)
    assert set(form_of(kind).optional) <= set(left), "it still tells which of these it had"
    for name in [*form_of(kind).content, *form_of(kind).optional]:
        assert left[name] != payload[name]
    assert not set(left) & (form_of(kind).gone - {"content"})


def test_what_nobody_has_decided_about_is_content_and_what_was_not_there_is_not_there_when_erased() -> None:
    newer = {"v": 9, "said": [1], "copied": {"run": "r", "seq": 1}}
    facts, content = split("of newer code", newer)
    assert (content, merged("of newer code", facts, content)) == ({"said": [1]}, newer)
    decided = {"verb": "approve", "digest": "d"}
    facts, content = split("approval_decided", {**decided, "reason": "fine"})
    assert merged("approval_decided", facts, None) == {**decided, "reason": ERASED}
    facts, content = split("approval_decided", {**decided, "arguments": {"pin": 1234}})
    erased = merged("approval_decided", facts, None)
    assert (content, erased["arguments"]) == ({"arguments": {"pin": 1234}}, {})
