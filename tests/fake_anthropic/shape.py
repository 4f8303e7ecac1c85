"""The small checks every rule is made of, with the API's own words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.fake_anthropic.errors import Refused

MAX_BREAKPOINTS = 4
_JSON_NAMES = {str: "string", bool: "boolean", dict: "dictionary", list: "list"}


def fields(value: Any, where: str, required: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """Return `value` if it is an object with the required fields and no others than these."""
    if not isinstance(value, dict):
        raise Refused(f"{where or 'body'}: Input should be an object")
    for name in required:
        if name not in value:
            raise Refused(f"{_at(where, name)}: Field required")
    for name in value:
        if name not in required and name not in optional:
            raise Refused(f"{_at(where, name)}: Extra inputs are not permitted")
    return value


def of(kind: type, value: Any, where: str) -> None:
    """Refuse a value that is not of this JSON type."""
    if not isinstance(value, kind):
        raise Refused(f"{where}: Input should be a valid {_JSON_NAMES[kind]}")


def integer(value: Any, where: str, least: int) -> None:
    """Refuse what is not an integer of at least this."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{where}: Input should be a valid integer")
    if value < least:
        raise Refused(f"{where}: Input should be greater than or equal to {least}")


def one_of(value: Any, where: str, allowed: Collection[str]) -> None:
    """Refuse any other value."""
    if not isinstance(value, str) or value not in allowed:
        *most, last = [f"'{each}'" for each in sorted(allowed)]
        expected = f"{', '.join(most)} or {last}" if most else last
        raise Refused(f"{where}: Input should be {expected}")


def tagged(value: Any, where: str, tags: Collection[str]) -> str:
    """Return the `type` of an object if it is one of these."""
    if not isinstance(value, dict):
        raise Refused(f"{where}: Input should be an object")
    if "type" not in value:
        raise Refused(f"{where}.type: Field required")
    tag = value["type"]
    if not isinstance(tag, str) or tag not in tags:
        expected = ", ".join(f"'{each}'" for each in sorted(tags))
        raise Refused(
            f"{where}: Input tag '{tag}' found using 'type' does not match any of the expected tags: "
            f"{expected}"
        )
    return tag


def cache_control(value: Any, where: str) -> None:
    """Check one breakpoint."""
    if value is not None:
        fields(value, where, ["type"], ["ttl"])
        one_of(value["type"], f"{where}.type", ["ephemeral"])
        one_of(value.get("ttl", "5m"), f"{where}.ttl", ["5m", "1h"])


def text(value: Any, where: str, group: str) -> None:
    """Check the text of a block; `group` is how the API calls the list it is in."""
    of(str, value, where)
    if not value:
        raise Refused(f"{group}: text content blocks must be non-empty")
    if not value.strip():
        raise Refused(f"{group}: text content blocks must contain non-whitespace text")


def _at(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
