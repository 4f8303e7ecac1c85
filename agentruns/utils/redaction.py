"""AGENTRUNS_REDACT: remove secrets from every text that is shown, exported or logged.

The journal, the model and the tools keep the true values. Log records also get the id of their run, and lose
the sensitive values of the calls that their thread is working on.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from operator import neg
from typing import Any, NamedTuple
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from agentruns.conf import settings
from agentruns.utils.json import distinct, is_utf8

FAILED = "[not shown: AGENTRUNS_REDACT failed]"
MASK = "***"
SHORT = 3  # characters; shorter values are searched only in texts that were made from them
LONG_NUMBER = 6  # digits; a shorter number is not searched inside longer numbers
LONG = 16  # characters; a value of at least so many is found by its first ones
# The work of a search per character of a text, beyond which all of the text is hidden. To compare a value
# takes TRIED and its length. A short text may take as much as one of LEAST_WORK characters.
MOST_WORK, TRIED, LEAST_WORK = 500, 64, 1_000

_NUMBER = re.compile(r"[-+.,\d]+")


class Driven(NamedTuple):
    """The run that a thread is working on, with the epoch of its lease; "" and 0 without a run or lease."""

    run_id: str = ""
    epoch: int = 0


class Secrets:
    """Sensitive values, with methods to mask them in texts and numbers that repeat them exactly.

    Values are found by their beginnings. The time of a search is linear in the text, whatever the values are.
    """

    def __init__(self, value: Any = None) -> None:
        self._known: set[str] = set()
        self._forms: set[str] = set()  # ways to write a value
        self._begins: set[str] = set()  # the first SHORT characters of each
        self._lengths: dict[str, list[int]] = {}  # their beginnings -> their lengths, the longest first
        self.add(value)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def add(self, value: Any) -> None:
        """Add every text and number in a JSON value, except keys of objects and blank texts."""
        for text in _leaves(value):
            if text.strip() and text != MASK and text not in self._known:
                self._known.add(text)
                escapes = (repr(text), json.dumps(text), json.dumps(text, ensure_ascii=False))
                for form in (text, text.strip(), *(escape[1:-1] for escape in escapes)):
                    self._add_form(form)

    def update(self, others: Secrets) -> None:
        """Add the values of other Secrets."""
        for form in list(others._forms):
            self._add_form(form)

    def _add_form(self, form: str) -> None:
        if form not in self._forms:
            lengths = self._lengths.setdefault(form[: LONG if len(form) >= LONG else SHORT], [])
            if len(form) not in lengths:
                insort(lengths, len(form), key=neg)
            self._begins.add(form[:SHORT])
            self._forms.add(form)

    def hide(self, text: str, *, short: bool = False) -> str:
        """Mask each value in a text, from left to right, and the longest value at each place.

        Values of fewer than SHORT characters are masked only with `short`, for a text that was made from the
        values. A short value or number is not masked inside a longer word or number (`_stands`). The whole
        text is masked if so many values begin alike that the search would take long.
        """
        found = self._find(text, short) if self._forms else []
        if not found:
            return MASK if found is None else text
        starts, ends = zip(*found, strict=True)
        return MASK.join(text[end:start] for end, start in zip((0, *ends), (*starts, len(text)), strict=True))

    def _find(self, text: str, short: bool) -> list[tuple[int, int]] | None:
        """Find where each value begins and ends, as `hide` masks them; None if the search would take long."""
        begins, found, end, work = self._begins, list[tuple[int, int]](), 0, 0
        most = MOST_WORK * (len(text) + LEAST_WORK)
        sizes, first = ((LONG, SHORT, 2, 1), 1) if short else ((LONG, SHORT), SHORT)
        begins = {begin[:first] for begin in list(begins)} if short else begins
        for at in (at for at in range(len(text)) if text[at : at + first] in begins):
            keys = (text[at : at + size] for size in sizes) if at >= end else ()
            for length in (each for key in keys for each in self._lengths.get(key, ())):
                work += TRIED + min(length, len(text))
                is_long = short or length >= SHORT
                if is_long and text[at : at + length] in self._forms and _stands(text, at, at + length):
                    end = at + length
                    found.append((at, end))
                    break
            if work > most:
                return None
        return found

    def settled(self, text: str) -> int:
        """Find the place in an unfinished text from which a value may have begun; else the text's length."""
        forms, end = sorted(self._forms), len(text)
        for start in range(max(0, end - max(map(len, forms), default=0)), end):
            if end - start >= SHORT and text[start : start + SHORT] not in self._begins:
                continue
            at = bisect_right(forms, text[start:])
            if at < len(forms) and forms[at].startswith(text[start:]):
                end = start
                break
        found = self._find(text, False)
        # A value that goes over this place must not be cut in two.
        return 0 if found is None else next((start for start, stop in found if start < end < stop), end)

    def walk(self, value: Any, *, short: bool = False) -> Any:
        """Copy a JSON value with the values masked: parts of texts and keys, and numbers as a whole."""
        if not self._forms:
            return value
        if isinstance(value, str):
            return self.hide(value, short=short)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return MASK if any(self.hide(each, short=short) != each for each in _leaves(value)) else value
        if isinstance(value, dict):
            return distinct((self.walk(key), self.walk(each, short=short)) for key, each in value.items())
        return [self.walk(each, short=short) for each in value] if isinstance(value, list | tuple) else value


def _stands(text: str, start: int, end: int) -> bool:
    """Check whether the value at this place is long, or short and no part of a longer number or word."""
    form = text[start:end]
    around = text[max(0, start - 1) : start], text[end : end + 1]
    if len(form) < LONG_NUMBER and _NUMBER.fullmatch(form):
        return not any(each.isdecimal() for each in around)
    return len(form) > SHORT or not any(each.isalnum() or each == "_" for each in around)


def _leaves(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value except names in dicts, and every number except booleans.

    A number is yielded in up to three forms: as Python writes it, with commas from 1,000 on, and without
    ".0".
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
        if abs(value) >= 1_000:
            yield f"{value:,}"
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


NOTHING = Driven()

_driven: ContextVar[Driven] = ContextVar("agentruns_driven", default=NOTHING)
_secrets: ContextVar[Secrets | None] = ContextVar("agentruns_secrets", default=None)

logger = logging.getLogger("agentruns.redaction")  # its records contain nothing to redact


def is_on() -> bool:
    """Check whether the project has set AGENTRUNS_REDACT."""
    return settings.REDACT is not None


def redact(text: str) -> str:
    """Redact a text by the project's function, if any; FAILED if the function raises or returns no text."""
    if not is_on():
        return text
    try:
        function: Callable[[str], object] | None = settings.redact
        made = text if function is None else function(text)
    except Exception as error:
        # Without the traceback and the error's text: either may quote the secret.
        logger.error("AGENTRUNS_REDACT failed with %s: the text is not shown.", type(error).__name__)
        return FAILED
    if not isinstance(made, str):
        logger.error("AGENTRUNS_REDACT returned %s, not str: the text is not shown.", type(made).__name__)
        return FAILED
    return made


def redacted(value: Any) -> Any:
    """Redact all texts, keys and integers in a JSON value; return it unchanged without AGENTRUNS_REDACT."""
    if not is_on():
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if (shown := redact(str(value))) == str(value) else shown  # as a credit card number
    if isinstance(value, dict):
        return distinct((redacted(key), redacted(item)) for key, item in value.items())
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return tuple(redacted(item) for item in value) if isinstance(value, tuple) else value


def get_logger(name: str) -> logging.Logger:
    """Get a logger whose records name their run and are redacted before any handler sees them."""
    made = logging.getLogger(name)
    if not any(isinstance(each, RedactingFilter) for each in made.filters):
        made.addFilter(RedactingFilter())
    return made


def driven() -> Driven:
    """Find the run that this thread is working on; NOTHING without a run."""
    return _driven.get()


def secrets() -> Secrets | None:
    """Find the sensitive values that this thread's log records hide; None outside of `bound` and `hiding`."""
    return _secrets.get()


@contextmanager
def bound(run_id: UUID | str, epoch: int = 0, hidden: Secrets | None = None) -> Iterator[None]:
    """Attribute the log records of the block to a run, and hide the values that `conceal` adds in the block.

    Also hides the values in `hidden`. If that is None, also hides those that this thread hides already.
    """
    token = _driven.set(Driven(str(run_id), epoch))
    try:
        with hiding(next((each for each in (hidden, _secrets.get()) if each is not None), Secrets())):
            yield
    finally:
        _driven.reset(token)


@contextmanager
def hiding(hidden: Secrets) -> Iterator[None]:
    """Hide values in the log records of the block, and of an exception that leaves the block."""
    token = _secrets.set(hidden)
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError):
            error.agentruns_secrets = hidden  # type: ignore[attr-defined]
        raise
    finally:
        _secrets.reset(token)


@contextmanager
def concealing(value: Any) -> Iterator[None]:
    """Hide the texts and numbers of a value in the log records of the block.

    If this thread hides values already, as it does for a run, the value stays hidden after the block, too.
    """
    hidden = _secrets.get()
    with hiding(Secrets() if hidden is None else hidden):
        conceal(value)
        yield


def conceal(value: Any) -> None:
    """Hide the texts and numbers of a value in later log records, if this thread hides values already."""
    if (hidden := _secrets.get()) is not None:
        hidden.add(value)


class RunFilter(logging.Filter):
    """A filter that adds `run_id` and `epoch` to a record without a `run_id`; "" and 0 if there is no run."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add `run_id` and `epoch`; accept every record."""
        if not hasattr(record, "run_id"):
            record.run_id, record.epoch = driven()
        return True


class RedactingFilter(RunFilter):
    """A filter that redacts a record's text and traceback, and removes its arguments and its exception.

    Only escapes characters that no handler could write if AGENTRUNS_REDACT is not set and no value is hidden.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record; accept every record."""
        super().filter(record)
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        args = record.args if isinstance(record.args, tuple) else ()
        found = [secrets(), *(getattr(each, "agentruns_secrets", None) for each in (error, *args))]
        hidden = [each for each in found if each]
        try:
            if not hidden and not is_on():
                return _printable(record)
        except ImproperlyConfigured:  # a tool tested without Django
            return _printable(record)
        try:
            record.msg = redact(_without(hidden, record.getMessage()))
        except Exception:  # an argument that cannot be converted to text
            record.msg = FAILED
        record.args = ()
        if record.exc_info:  # its frames hold the variables
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = redact(_without(hidden, text))
            record.exc_info = None
        return _printable(record)


def _printable(record: logging.LogRecord) -> bool:
    """Escape lone surrogates in a record, because no handler could write them; return True."""
    trace = record.exc_text or ""
    if record.exc_info and not trace:
        trace = logging.Formatter().formatException(record.exc_info)
    if not is_utf8(f"{record.msg} {record.args} {trace}"):
        record.msg, record.args = record.getMessage().encode(errors="backslashreplace").decode(), ()
        record.exc_text = trace.encode(errors="backslashreplace").decode()
    return True


def _without(hidden: list[Secrets], text: str) -> str:
    for each in hidden:
        text = each.hide(text, short=True)
    return text
