"""Facts and content: every member of every kind is decided, and the two parts add up to the payload again."""

from __future__ import annotations

from typing import Any, NotRequired, get_origin, get_type_hints

import pytest

from agentruns.journal import events
from agentruns.models.parts import COMMON, ERASED, FORMS, Form, merged, split
from tests.unit.kinds import PAYLOADS

NESTED = {"calls": events.AskedCall, "error": events.Error}


def members(payload: type) -> dict[str, bool]:
    """Return the members of a payload, and whether each is always there."""
    hints = get_type_hints(payload, include_extras=True)
    return {name: get_origin(hint) is not NotRequired for name, hint in hints.items() if name not in COMMON}


def decided(form: Form) -> list[str]:
    return [*form.facts - COMMON, *form.content, *form.optional, *form.gone, *form.inside]


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_every_member_is_a_fact_or_content(kind: str) -> None:
    form, payload = FORMS[kind], PAYLOADS[kind]
    assert sorted(decided(form)) == sorted(members(payload)), "decide about it in models/parts.py, once"
    for name, inside in form.inside.items():
        assert sorted(decided(inside)) == sorted(members(NESTED[name]))
    assert all(members(payload)[name] for name in form.content), "what an erased row always has"
    assert not any(members(payload)[name] for name in form.optional)
    assert set(FORMS) == set(PAYLOADS)


def whole(kind: str) -> dict[str, Any]:
    """Return a payload of a kind with every member."""
    payload = {name: f"the {name}" for name in [*members(PAYLOADS[kind]), "v", "newer"]}
    for name in FORMS[kind].inside:
        one = {member: f"the {member}" for member in members(NESTED[name])}
        payload[name] = [one, {**one, "newer": 1}] if name == "calls" else one  # type: ignore[assignment]
    return payload


@pytest.mark.parametrize("kind", [*sorted(PAYLOADS), "of newer code"])
def test_the_parts_add_up_to_the_payload(kind: str) -> None:
    payload = whole(kind) if kind in FORMS else {"v": 9, "said": [1], "copied": {"run": "r", "seq": 1}}
    facts, content = split(kind, payload)
    assert merged(kind, facts, content) == payload
    assert content if kind in FORMS else content == {"said": [1]}, "what nobody has decided about is content"


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_an_erased_row_has_the_members_that_readers_count_on(kind: str) -> None:
    payload = whole(kind)
    facts, _content = split(kind, payload)
    left = merged(kind, facts, None)
    required = {name for name, always in members(PAYLOADS[kind]).items() if always}
    assert required - FORMS[kind].gone <= set(left) <= set(payload)
    assert set(FORMS[kind].optional) <= set(left), "it still tells which of these it had"
    for name in [*FORMS[kind].content, *FORMS[kind].optional]:
        assert left[name] != payload[name]
    assert not set(left) & (FORMS[kind].gone - {"content"})


def test_an_optional_member_that_was_not_there_is_not_there_when_erased_either() -> None:
    facts, content = split("approval_decided", {"verb": "approve", "digest": "d", "reason": "fine"})
    assert merged("approval_decided", facts, None) == {"verb": "approve", "digest": "d", "reason": ERASED}
    edit = {"verb": "approve", "digest": "d", "arguments": {"pin": 1234}}
    facts, content = split("approval_decided", edit)
    assert (content, merged("approval_decided", facts, None)["arguments"]) == (
        {"arguments": {"pin": 1234}},
        {},
    )
