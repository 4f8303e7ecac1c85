"""Canonical JSON, the hash chain's digests, and the first difference between two values."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

ESCAPE = "\x10"
GENESIS = "0" * 64

_UNSAFE = re.compile("[\x00\x10\ud800-\udfff]")
_ESCAPED = re.compile("\x10([0-9a-f]{4})")
_ILLEGAL = re.compile("[\x00\ud800-\udfff]")
# In a string every DLE is followed by four hex digits, so these three texts can only be numbers.
_NON_FINITE = {ESCAPE + "NaN": math.nan, ESCAPE + "Infinity": math.inf, ESCAPE + "-Infinity": -math.inf}


def dumps(value: Any) -> str:
    """Encode a JSON value as its canonical text: sorted keys, no insignificant space.

    NUL, DLE, lone surrogates, NaN and infinity are escaped, and `loads` restores them. Raises TypeError for
    anything that is not JSON, and ValueError or RecursionError for a circular value.
    """
    try:
        text = _encode(value)
    except ValueError:  # a non-finite number, most likely
        return _encode(_walk(value, escape_text, ESCAPE))
    # NUL and DLE are written as \u0000 and \u0010; a false alarm ("\\u0010") only costs the walk.
    if "\\u00" in text or not is_utf8(text):
        return _encode(_walk(value, escape_text, ESCAPE))
    return text


def loads(text: str) -> Any:
    """Decode a canonical text to its value; raises ValueError if the text is not exactly one JSON value."""
    value, end = _decode(text)  # most of `json.loads` is for space around a value
    if end != len(text):
        raise ValueError(f"More text follows the JSON value that ends at character {end}.")
    if "\\u0010" not in text:
        return value
    return _walk(value, lambda each: _NON_FINITE.get(each, unescape_text(each)), ESCAPE)


def digest(value: Any) -> str:
    """Compute the SHA-256 of a value's canonical text, in hex."""
    return sha256(dumps(value))


def sha256(text: str) -> str:
    """Compute the SHA-256 of a text's UTF-8, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def escape_text(text: str) -> str:
    """Escape NUL, DLE and lone surrogates in `text`, so that any text column can store it."""
    if is_utf8(text) and "\x00" not in text and ESCAPE not in text:
        return text
    return _UNSAFE.sub(lambda match: f"{ESCAPE}{ord(match[0]):04x}", text)


def unescape_text(text: str) -> str:
    """Restore the original of a text that `escape_text` escaped."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if ESCAPE in text else text


def legal(value: Any) -> Any:
    """Convert `value` to strict JSON for a provider. Illegal characters become U+FFFD, and NaN a text."""
    return _walk(value, _legal_text, "")


def legal_text(value: Any) -> str:
    """Encode `value` as strict JSON text for a provider, without the escapes of `dumps`."""
    return _encode(legal(value))


def _encoder() -> Callable[[Any], str]:
    """Build a function like `JSONEncoder.encode` that creates no new C encoder for each value."""
    ordinary = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # not CPython
        return ordinary.encode
    # Its arguments: markers (None: a circular value is too deep instead), default, encoder, indent,
    # key separator, item separator, sort_keys, skipkeys, allow_nan.
    encode = make(None, ordinary.default, quoted, None, ":", ",", True, False, False)
    return lambda value: "".join(encode(value, 0))


quoted = json.encoder.encode_basestring  # a text as it stands in canonical JSON, unescaped
_encode = _encoder()
_decode = json.JSONDecoder().raw_decode


def is_utf8(text: str) -> bool:
    """Check whether a text can be encoded as UTF-8; many times faster than a search for lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(value: Any, text: Callable[[str], Any], mark: str) -> Any:
    """Copy a JSON value, and apply the function `text` to each string and each key.

    NaN and infinite numbers become strings: `mark`, followed by the number's name, such as "NaN".
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return mark + ("NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity"))
    if isinstance(value, dict):
        return {_walk(key, text, mark): _walk(item, text, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(item, text, mark) for item in value]
    return value


def distinct(members: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Build a dict of all members; a name that is taken gets a number after it, from 2 on.

    Two names may become equal when secrets in them are masked, and no member may be lost.
    """
    made: dict[Any, Any] = {}
    numbers: dict[Any, int] = {}
    for name, value in members:
        free = name
        while free in made:
            numbers[name] = numbers.get(name, 1) + 1
            free = f"{name} ({numbers[name]})"
        made[free] = value
    return made


def select(value: Any, paths: Iterable[str]) -> Any:
    """Copy the members of an object, or of each object in a list, that paths such as `calls.id` name.

    A value that is neither becomes {}.
    """
    if isinstance(value, list):
        return [select(each, paths) for each in value]
    inner: dict[str, list[str]] = {}
    for path in paths:
        name, _dot, rest = path.partition(".")
        inner.setdefault(name, []).extend([rest] if rest else [])
    named = inner.keys() & value.keys() if isinstance(value, dict) else ()
    return {name: select(value[name], inner[name]) if inner[name] else value[name] for name in named}


def _legal_text(text: str) -> str:
    # Most texts are plain, and the search takes many times longer.
    return text if "\x00" not in text and is_utf8(text) else _ILLEGAL.sub("\ufffd", text)


_NAME = re.compile(r"[A-Za-z_]\w*")


class Difference(NamedTuple):
    """The JSON path of the first difference, with both values; None for a missing value."""

    path: str
    then: Any
    now: Any


def first_difference(then: Any, now: Any, path: str = "$") -> Difference | None:
    """Find the first difference between two JSON values; None if they are equal. `path` is where both stand.

    Compares the members of objects in the order of their names, and the items of lists in their order. The
    types must be the same, too: 1, 1.0 and True differ.
    """
    if isinstance(then, list) and isinstance(now, list):
        then, now = dict(enumerate(then)), dict(enumerate(now))
    elif not isinstance(then, dict) or not isinstance(now, dict):
        # To Python True equals 1 and 1 equals 1.0; to the model they differ.
        same = type(then) is type(now) and (then == now or (then != then and now != now))  # NaN is not itself
        return None if same else Difference(path, then, now)
    for key in sorted({*then, *now}):
        inner = f"{path}[{key}]" if isinstance(key, int) else f"{path}{_step(key)}"
        found: Difference | None = Difference(inner, then.get(key), now.get(key))
        if key in then and key in now:
            found = first_difference(then[key], now[key], inner)
        if found is not None:
            return found
    return None


def passes(path: str, names: frozenset[str]) -> bool:
    """Check whether a JSON path passes through a member with one of these names."""
    return any(_step(name) + end in path + "." for name in names for end in (".", "["))


def _step(name: str) -> str:
    return f".{name}" if _NAME.fullmatch(name) else f"[{json.dumps(name)}]"
