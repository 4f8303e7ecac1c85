"""The two parts of a row: facts, which the fold needs and nobody erases, and content, which can be erased.

Each part has a commitment: a hash with a random salt of its own. Without the salt nobody can guess the text,
so whoever hides a part hides its salt. The chain is made of the commitments and still verifies.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, NotRequired, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

ERASED = "[erased]"
HAS = "has"  # fact: which optional members the content has, so that an erased row still tells

Payload = dict[str, Any]
T = TypeVar("T")

# Annotations of the members of a payload; a member without one is content.
_FACT, _GONE = object(), object()
Fact = Annotated[T, _FACT]
Gone = Annotated[T, _GONE]  # content that an erased row lacks
Blocks = Annotated[list[dict[str, Any]], [{"type": "text", "text": ERASED}]]  # with their neutral value


class Form:
    """The facts of a payload and the neutral values of its erased content, as its TypedDict is annotated.

    `content` maps the members that every payload of the type has to their neutral values, `optional` the
    other members. `gone` are members that an erased row lacks. `inside` maps members that are objects, or
    lists of objects, to the forms by which they are split.
    """

    def __init__(self, payload: type) -> None:
        self.facts = {HAS}
        self.content: Payload = {}
        self.optional: Payload = {}
        self.gone: set[str] = set()
        self.inside: dict[str, Form] = {}
        for name, given in get_type_hints(payload, include_extras=True).items():
            is_optional = get_origin(given) is NotRequired
            hint = get_args(given)[0] if is_optional else given
            item = get_args(hint)[0] if get_origin(hint) is list else hint
            mark = {} if get_origin(hint) is dict else ERASED
            mark = hint.__metadata__[0] if get_origin(hint) is Annotated else mark
            if mark is _FACT:
                self.facts.add(name)
            elif mark is _GONE:
                self.gone.add(name)
            elif is_typeddict(item):
                self.inside[name] = Form(item)
            else:
                (self.optional if is_optional else self.content)[name] = mark

    def split(self, payload: Mapping[str, Any]) -> tuple[Payload, Payload]:
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
        """Build the content that takes the place of an erased row's content.

        It has an optional member only if `facts` say that the row had this member.
        """
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


def joined(facts: Payload, content: Payload) -> Payload:
    """Join the two parts of a payload, and of the objects in it."""
    payload = {**facts}
    payload.pop(HAS, None)
    for name, value in content.items():
        fact = payload.get(name)
        if isinstance(fact, dict) and isinstance(value, dict):
            payload[name] = joined(fact, value)
        elif isinstance(fact, list) and isinstance(value, list):
            payload[name] = [joined(*pair) for pair in zip(fact, value, strict=True)]
        else:
            payload[name] = value
    return payload


def commitment(salt: str, text: str) -> str:
    """Compute the hash of a part's salt and canonical text, which the chain contains."""
    return hashlib.sha256(bytes.fromhex(salt) + text.encode()).hexdigest()


def keyed(key: str, text: str) -> str:
    """Compute the HMAC-SHA256 of a text, in hex. The key is in hex, too."""
    return hmac.digest(bytes.fromhex(key), text.encode(), "sha256").hex()
