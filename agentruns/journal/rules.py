"""Standing rules as data: conditions and caps, checked against a tool's parameters and tried on a call. Pure.

A rule never guesses: a missing member, another type or a negative amount means that it does not match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.crypto import salted_hmac
from django.utils.formats import date_format
from django.utils.translation import gettext as _, gettext_lazy
from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentruns.models.rule import Amount, ApprovalRule
from agentruns.utils import json as canonical
from agentruns.utils.bounds import NAME_LENGTH

MOST_CONDITIONS = 20  # of a rule; as many caps
LONGEST_TEXT = 10_000  # characters of a text that a pattern is tried on
LONGEST_WINDOW = timedelta(days=366)
MOST = Decimal(10) ** 15  # of a cap
WORDS = {
    "==": gettext_lazy("%(path)s is %(value)s"),
    "in": gettext_lazy("%(path)s is one of %(value)s"),
    "<=": gettext_lazy("%(path)s is at most %(value)s"),
    ">=": gettext_lazy("%(path)s is at least %(value)s"),
    "prefix": gettext_lazy("%(path)s begins with %(value)s"),
    "regex": gettext_lazy("%(path)s matches %(value)s"),
}
COUNT = "count"  # `of` of a cap that counts calls
NUMBERS = {"integer", "number"}  # JSON types


class Facts(NamedTuple):
    """The values of a call that a rule may look at."""

    arguments: Mapping[str, Any]
    context: Mapping[str, Any]
    requesters: tuple[str, ...]  # ids of users

    def at(self, path: str) -> Any:
        """Find the value at a path such as "arguments.cents"; raises LookupError if there is none."""
        value: Any = {"arguments": self.arguments, "context": self.context}
        for name in path.split("."):
            if not isinstance(value, Mapping):
                raise LookupError(path)
            value = value[name]
        return value


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one value of a call, by one of the operators in WORDS.

    `path` is "arguments.NAME", "context.NAME", with further names for members of objects, or "requester".
    """

    path: str
    op: str
    value: Any

    def holds(self, facts: Facts) -> bool:
        """Check whether a call fits the condition; every requester has to fit."""
        if self.path == "requester":
            return bool(facts.requesters) and all(map(self._fits, facts.requesters))
        try:
            return self._fits(facts.at(self.path))
        except LookupError:
            return False

    def _fits(self, given: Any) -> bool:
        if self.op == "==":
            return _same(given, self.value)
        if self.op == "in":
            return any(_same(given, each) for each in self.value)
        if self.op in ("<=", ">="):
            low, high = (given, self.value) if self.op == "<=" else (self.value, given)
            first, second = number(low), number(high)
            return first is not None and second is not None and first <= second
        if not isinstance(given, str):
            return False
        if self.op == "prefix":
            return given.startswith(self.value)
        return len(given) <= LONGEST_TEXT and _pattern(self.value).isinstance_python(given)


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit for the calls that a rule approves: how many, or the sum of one number, in a time window."""

    of: str  # COUNT, or the path of a number
    most: str  # as digits
    seconds: int  # of the window
    per: tuple[str, ...] = ()  # paths whose values have a cap of their own

    def amount(self, place: int, facts: Facts) -> Amount:
        """Compute how much a call counts toward the cap; raises LookupError if that is not known."""
        counted = Decimal(1) if self.of == COUNT else number(facts.at(self.of))
        if counted is None or counted < 0 or counted > MOST:
            raise LookupError(self.of)
        key = [facts.at(path) if path != "requester" else sorted(facts.requesters) for path in self.per]
        return Amount(
            place, salted_hmac("agentruns.cap", canonical.dumps(key), algorithm="sha256").hexdigest(), counted
        )

    def shares(self, facts: Facts) -> list[Facts]:
        """List the facts to count a call by: a cap per requester counts it in full for each of them."""
        alone = [facts._replace(requesters=(each,)) for each in facts.requesters]
        return alone if alone and "requester" in self.per else [facts]


class Match(NamedTuple):
    """A rule that fits a call, with the amounts that the call counts toward the rule's caps."""

    rule: ApprovalRule
    amounts: list[Amount]


def conditions_of(rule: ApprovalRule) -> list[Condition]:
    """Build a rule's conditions from their stored form."""
    return [Condition(**each) for each in rule.conditions]


def caps_of(rule: ApprovalRule) -> list[Cap]:
    """Build a rule's caps from their stored form."""
    return [Cap(**{**each, "per": tuple(each["per"])}) for each in rule.caps]


def match(rule: ApprovalRule, facts: Facts) -> Match | None:
    """Try a rule on a call; None if the rule does not fit."""
    if not all(condition.holds(facts) for condition in conditions_of(rule)):
        return None
    try:
        caps = enumerate(caps_of(rule))
        return Match(rule, [cap.amount(place, one) for place, cap in caps for one in cap.shares(facts)])
    except LookupError:
        return None


def number(value: Any) -> Decimal | None:
    """Convert a JSON number, or a text of digits such as "12.50", to an exact number; None for others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        exact = Decimal(str(value))
    except (InvalidOperation, ValueError):  # the latter for more digits than Python prints
        return None
    return exact if exact.is_finite() else None


def _same(given: Any, value: Any) -> bool:
    """Compare JSON values; numbers by their value, all others by type and value."""
    if isinstance(given, int | float) and isinstance(value, int | float):
        return isinstance(given, bool) is isinstance(value, bool) and number(given) == number(value)
    return type(given) is type(value) and bool(given == value)


@lru_cache(maxsize=500)
def _pattern(pattern: str) -> SchemaValidator:
    """Build the check for a pattern, in Rust's engine: its time is linear in the text, whatever the pattern.

    Raises SchemaError for an invalid pattern.
    """
    whole = rf"\A(?:{pattern})\z"
    return SchemaValidator(core_schema.str_schema(pattern=whole, regex_engine="rust-regex", strict=True))


def schema_hash(schema: Mapping[str, Any]) -> str:
    """Compute the hash by which a rule recognises the parameters of the tool that it was written for."""
    return hashlib.sha256(canonical.dumps(dict(schema)).encode()).hexdigest()


def mistakes(
    conditions: Iterable[Any], caps: Iterable[Any], schema: Mapping[str, Any], hidden: Iterable[str]
) -> Iterator[str]:
    """Yield what is wrong with conditions and caps as JSON; `hidden` are the tool's sensitive parameters."""
    conditions, caps, hidden = list(conditions), list(caps), {*hidden}
    if len(conditions) > MOST_CONDITIONS or len(caps) > MOST_CONDITIONS:
        yield _("A rule has at most %(count)d conditions and as many caps.") % {"count": MOST_CONDITIONS}
        return
    for place, each in enumerate(conditions, 1):
        if not isinstance(each, dict) or each.keys() != {"path", "op", "value"} or each["op"] not in [*WORDS]:
            text = _("Condition %(place)d must have path, op and value; op is one of %(names)s.")
            yield text % {"place": place, "names": ", ".join(WORDS)}
        elif why := wrong_condition(each, schema, hidden):
            yield _("Condition %(place)d: %(why)s") % {"place": place, "why": why}
    for place, each in enumerate(caps, 1):
        if not isinstance(each, dict) or each.keys() != {"of", "most", "seconds", "per"}:
            yield _("Cap %(place)d must have of, most, seconds and per.") % {"place": place}
        elif why := wrong_cap(each, schema, hidden):
            yield _("Cap %(place)d: %(why)s") % {"place": place, "why": why}


def wrong_condition(condition: Mapping[str, Any], schema: Mapping[str, Any], hidden: Collection[str]) -> str:
    """Explain what is wrong with one condition; "" if nothing is."""
    path, op, value = condition["path"], condition["op"], condition["value"]
    if why := _wrong_path(path, schema, hidden):
        return why
    types = {"string"} if path == "requester" else _types_of(path, schema)
    if op in ("<=", ">="):
        is_right, wants = number(value) is not None and bool(types & NUMBERS), _("a number")
    elif op in ("prefix", "regex"):
        is_right, wants = isinstance(value, str) and "string" in types, _("a text")
    elif op == "in":
        is_right = isinstance(value, list) and 0 < len(value) <= 1000
        is_right = is_right and all(type_of(each) & types for each in value)
        wants = _("a list of values of the parameter's type")
    else:
        is_right, wants = bool(type_of(value) & types), _("of the parameter's type")
    if not is_right:
        return _("%(path)s %(op)s: the value must be %(wants)s, and the parameter must allow it.") % {
            "path": path, "op": op, "wants": wants,
        }  # fmt: skip
    if op == "regex":
        try:
            SchemaValidator(core_schema.str_schema(pattern=value))  # alone: no bracket may end the anchors
            _pattern(value)
        except SchemaError:
            return _("%(value)r is not a regular expression of Rust's syntax.") % {"value": value}
    return ""


def _wrong_path(path: Any, schema: Mapping[str, Any], hidden: Collection[str]) -> str:
    if path == "requester":
        return ""
    place, *names = path.split(".") if isinstance(path, str) and len(path) <= NAME_LENGTH else [""]
    if place not in ("arguments", "context") or not all(names) or not names:
        return _("%(path)r is not requester, arguments.NAME or context.NAME.") % {"path": path}
    if place == "arguments" and names[0] in hidden:
        return _("%(name)s is a sensitive parameter, and rules never look at these.") % {"name": names[0]}
    if not _types_of(path, schema):
        return _("the tool has no parameter %(name)s.") % {"name": ".".join(names)}
    return ""


def _types_of(path: str, schema: Mapping[str, Any]) -> set[str]:
    """List the JSON types that a value at a path may have; a context has no schema."""
    place, *names = path.split(".")
    return types_at(schema, names) if place == "arguments" else {*_TYPES}


def wrong_cap(cap: Mapping[str, Any], schema: Mapping[str, Any], hidden: Collection[str]) -> str:
    """Explain what is wrong with one cap; "" if nothing is."""
    of, seconds, most, per = cap["of"], cap["seconds"], number(cap["most"]), cap["per"]
    if not isinstance(per, list | tuple) or len(per) > MOST_CONDITIONS:
        return _("per must be a list of paths.")
    if of != COUNT:
        if of == "requester" or (why := _wrong_path(of, schema, hidden)):
            return why if of != "requester" else _("of must be count, or the path of a number.")
        if not _types_of(of, schema) & NUMBERS:
            return _("%(path)s is no number.") % {"path": of}
    if why := next(filter(None, (_wrong_path(path, schema, hidden) for path in per)), ""):
        return why
    if type(seconds) is not int or not 0 < seconds <= LONGEST_WINDOW.total_seconds():
        return _("seconds must be a whole number, at most a year.")
    if most is None or not 0 <= most <= MOST:
        return _("most must be a number that is not negative, as text.")
    return ""


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def type_of(value: Any) -> set[str]:
    """List the JSON types of a single value: a whole number is a number, too; a boolean is neither."""
    if isinstance(value, bool):
        return {"boolean"}
    return {name for name, kind in _TYPES.items() if name != "boolean" and isinstance(value, kind)}


def types_at(schema: Mapping[str, Any], names: list[str]) -> set[str]:
    """List the JSON types that a schema allows at a path of names: a parameter, or a member of one."""
    forms: list[Any] = [schema]
    for name in names:
        forms = [
            form["properties"][name] for form in _flat(schema, forms) if name in form.get("properties", {})
        ]
    types = set[str]()
    for form in _flat(schema, forms):
        named, consts = form.get("type", []), [form["const"]] if "const" in form else []
        types |= {named} if isinstance(named, str) else {*named}
        types = types.union(*map(type_of, [*form.get("enum", []), *consts]))
    return types


def _flat(schema: Mapping[str, Any], forms: Iterable[Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield forms of a JSON schema with references and alternatives resolved."""
    for form in forms:
        if not isinstance(form, dict) or depth > 20:
            continue
        yield form
        referred = form.get("$ref", "").removeprefix("#/$defs/")
        inner = [schema.get("$defs", {}).get(referred)] if referred else []
        for word in ("anyOf", "oneOf", "allOf"):
            inner += form.get(word, [])
        yield from _flat(schema, inner, depth + 1)


def sentence(rule: ApprovalRule, show: Callable[[str], str] = str) -> str:
    """Explain a rule in one sentence; `show` formats each of its names and values."""
    verbs = {
        ApprovalRule.Effect.APPROVE: _("Approve %(tool)s"),
        ApprovalRule.Effect.DENY: _("Deny %(tool)s"),
        ApprovalRule.Effect.ASK: _("Ask a person about %(tool)s"),
    }
    parts = [verbs[ApprovalRule.Effect(rule.effect)] % {"tool": show(rule.tool)}]
    said = []
    for each in conditions_of(rule):
        values = each.value if each.op == "in" else [each.value]
        is_number = isinstance(each.value, str) and each.op in ("<=", ">=")
        value = ", ".join(show(one if is_number else canonical.dumps(one)) for one in values)
        said.append(WORDS[each.op] % {"path": show(short(each.path)), "value": value})
    if said:
        parts[0] += " " + _("if %(conditions)s") % {"conditions": _(" and ").join(said)}
    parts += [limit(cap, show) for cap in caps_of(rule)]
    if rule.expires_at is not None:
        when = date_format(timezone.localtime(rule.expires_at), "DATETIME_FORMAT")
        parts.append(_("until %(when)s") % {"when": when})
    return ", ".join(parts) + "."


def limit(cap: Cap, show: Callable[[str], str] = str) -> str:
    """Explain a cap, such as "at most 5 calls per customer in a day"; `show` formats its names."""
    facts = {"most": cap.most, "of": show(short(cap.of)), "window": _window(cap.seconds)}
    facts["per"] = "".join(_(" per %(path)s") % {"path": show(short(path))} for path in cap.per)
    if cap.of == COUNT:
        return _("at most %(most)s calls%(per)s in %(window)s") % facts
    return _("at most %(most)s of %(of)s%(per)s in %(window)s") % facts


def short(path: str) -> str:
    """Shorten "arguments.cents" to "cents", unless that could be taken for another path."""
    name = path.removeprefix("arguments.")
    return path if name.partition(".")[0] in ("arguments", "context", "requester") else name


def _window(seconds: int) -> str:
    for length, one, many in ((86400, _("a day"), _("%d days")), (3600, _("an hour"), _("%d hours"))):
        if seconds % length == 0:
            return one if seconds == length else many % (seconds // length)
    return _("%d seconds") % seconds
