"""Masks that hide sensitive values in rows, runs, approvals and results from people who may not reveal them.

A tool names sensitive arguments (`sensitive`) and parts of its result (`sensitive_results`). These are masked
wherever they stand, and so is every text and number of the session that repeats one of their values: a
preview, a title, an answer of the model. EXITS in tests/masks/exits.py lists all places that show data.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import SequenceMatcher
from itertools import accumulate
from operator import itemgetter
from typing import Any
from uuid import UUID

from django.db.models import QuerySet, Sum
from django.db.models.functions import Length

from agentruns.conf import settings
from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.journal.read import COLUMNS, NAMING, definition_bodies, definitions_in, row_of
from agentruns.models import Approval, Message, Run
from agentruns.models.parts import facts_of
from agentruns.tools.card import MASK
from agentruns.tools.refusals import EFFECTS
from agentruns.utils.redaction import FAILED, Secrets, hiding, is_on, redact, secrets

LEAST_MASK = 3  # characters; shorter pieces also occur in texts that carry no mask
GENERATIONS = 10  # forks of forks up to this depth: the values of their origins are masked too
MOST_ROWS = 5_000  # read at most for the few runs on a front page
MOST_READ = 2_000_000  # characters of rows for the masks of one list
MOST_COMPARED = 1_000  # words and signs; comparing more would hold a decision's transaction open

_KEPT = frozenset(("stored", "sent"))  # content that holds no text by a model, a tool or a person
_BLOCK_FACTS = frozenset(("type", "id", "tool_use_id", "name", "is_error"))
_RESULTS = (events.TOOL_RESULT, events.LATE_RESULT, events.ORPHAN_RESOLVED)
_WORKED = (events.ORPHAN_FOUND, *_RESULTS)  # rows about what a handler did
_HOLDING = (events.ASSISTANT, events.APPROVAL_DECIDED, *_WORKED)  # rows that hold sensitive values
_MADE = (
    events.ASSISTANT, events.MODEL_FAILED, events.APPROVAL_REQUESTED, events.ORPHAN_FOUND,
    events.RUN_COMPLETED, events.RUN_FAILED,
)  # fmt: skip
_TOLD = ("answered", "denied", "expired", "cancelled", "unknown")  # outcomes whose text no tool wrote

_WORD = re.compile(r"\w+|\W")


class Mask:
    """The sensitive names of one session by tool, and the values that the session's rows gave them.

    A mask learns the values of each row that it masks; `mask_of` builds a mask that knows the whole session.
    """

    def __init__(self, definitions: Iterable[dict[str, Any]] = ()) -> None:
        self.arguments_of: dict[str, tuple[str, ...]] = {}
        self.results_of: dict[str, tuple[str, ...]] = {}
        self.taken: dict[str, set[str]] = defaultdict(set)  # tool -> names of its parameters
        self.secrets = Secrets()
        for definition in definitions:
            self.add(definition)

    def add(self, definition: dict[str, Any]) -> None:
        """Add a definition's sensitive names; a name that one definition calls sensitive stays sensitive."""
        for name, policy in definition.get("tools", {}).items():
            self.taken[name].update(policy.get("input_schema", {}).get("properties", ()))
            for key, found in (("sensitive", self.arguments_of), ("sensitive_results", self.results_of)):
                if policy.get(key):
                    found[name] = tuple(dict.fromkeys((*found.get(name, ()), *policy[key])))

    def __bool__(self) -> bool:
        return bool(self.arguments_of or self.results_of)

    def names(self, tool: str) -> tuple[str, ...]:
        """Look up the names of a tool's sensitive arguments."""
        return self.arguments_of.get(tool, ())

    def hides(self, tool: str, name: str) -> bool:
        """Check whether an argument is sensitive by name, or unknown to a tool with sensitive arguments."""
        names = self.names(tool)
        return name in names or (bool(names) and name not in self.taken[tool])

    def guards(self, tool: str) -> bool:
        """Check whether a tool has sensitive arguments or results."""
        return tool in self.arguments_of or tool in self.results_of

    def guards_file(self, tool: str) -> bool:
        """Check whether a tool's stored file may hold a text to redact or a sensitive value."""
        return is_on() or self.guards(tool) or bool(self.secrets)

    def guards_block(self, tool: str, block: dict[str, Any]) -> bool:
        """Check whether a block's file may hold a text to hide; for an image only `guards` decides."""
        return self.guards(tool) if block.get("type") == "image" else self.guards_file(tool)

    # What is shown

    def row(self, row: Row) -> Row:
        """Mask a journal row, and remove the hashes and data that would reveal its stored files."""
        stored = row.payload.get("stored")
        if stored is not None:
            # With the hash of a file whose beginning is shown, the rest could be guessed.
            hidden = {"data", "sha256"} if self.guards_file(row.tool_name) else {"data"}
            row = row._replace(payload={**row.payload, "stored": _without(stored, hidden)})
            if payloads.has_blocks(row.payload):
                row.payload["content"] = [
                    _without(each, {"sha256"} if self.guards_block(row.tool_name, each) else set())
                    for each in row.payload["content"]
                ]
        if not self:
            return row
        self.learn(row)
        return row._replace(
            payload={name: self._member(row, name, each) for name, each in row.payload.items()}
        )

    def run(self, run: Run) -> Run:
        """Mask a run's texts in a copy, which must never be saved."""
        said, made = ("input", "title", "context", "blocked_reason"), ("output", "error")
        texts: dict[str, Callable[[Any], Any]] = dict.fromkeys(said, self.said)
        texts |= dict.fromkeys(made, self.text)
        return self._copy(run, texts) if self else run

    def approval(self, approval: Approval) -> Approval:
        """Mask an approval, and its run if the run is loaded, in a copy, which must never be saved."""
        if not self:
            return approval
        tool = approval.tool_name
        shown: Approval = self._copy(
            approval,
            {
                "arguments": lambda given: self.arguments(tool, given),
                "title": lambda text: self.made(tool, text),
                "why": self.text,
                "reason": self.said,
            },
        )
        if "run" in shown._state.fields_cache:
            shown._state.fields_cache = {**shown._state.fields_cache, "run": self.run(approval.run)}
        return shown

    def arguments(self, tool: str, arguments: Any) -> Any:
        """Mask a tool's sensitive arguments, and sensitive values that its other arguments repeat."""
        names = self.names(tool)
        if not isinstance(arguments, dict):
            return MASK if names and arguments is not None else self.value(arguments)
        return {
            self.text(name): MASK if self.hides(tool, name) else self.value(each)
            for name, each in arguments.items()
        }

    def made(self, tool: str, value: Any) -> Any:
        """Mask a preview or title that a tool made of arguments; all of it if part of a value may remain."""
        if not self.names(tool) or value is None:
            return self.value(value)
        shown = self.value(self._named(value, self.names(tool)), tool)
        return MASK if self.secrets.is_suspect(shown) else shown

    def value(self, value: Any, tool: str = "") -> Any:
        """Mask sensitive values in a JSON value; short values only if `tool` has sensitive arguments."""
        return self.secrets.walk(value, short=bool(self.names(tool))) if self else value

    def said(self, value: Any, tool: str = "") -> Any:
        """Mask sensitive values, and values similar to them, in a text that a person wrote."""
        return self.secrets.walk(value, short=bool(self.names(tool)), alike=True) if self else value

    def text(self, text: Any) -> Any:
        """Mask sensitive values in a text; return anything else, such as None, as it is."""
        return self.secrets.hide(text) if self and isinstance(text, str) else text

    # What is known

    def learn(self, row: Row) -> None:
        """Add the sensitive values of a row to the known values."""
        payload = row.payload
        for call in _dicts(payload.get("calls") if row.kind == events.ASSISTANT else None):
            tool = str(call.get("tool"))
            self.know(tool, call.get("arguments"))
            for original in _dicts([call.get("original")]):
                self.know(tool, original.get("input"))
        for block in _dicts(payload.get("content") if row.kind == events.ASSISTANT else None):
            if block.get("type") == "tool_use":
                self.know(str(block.get("name")), block.get("input"))
        for field in ("arguments", "edited"):
            self.know(row.tool_name, payload.get(field))
        if row.kind in _RESULTS and not _is_told(row):
            for field in ("content", "result"):
                self.know_result(row.tool_name, payload.get(field), payload)
        for text in self._errors(row):
            self.secrets.add(_words(text)[1])

    def know(self, tool: str, arguments: Any) -> None:
        """Add the values of a call's sensitive arguments to the known values."""
        if not self.names(tool):
            return
        if isinstance(arguments, dict):
            arguments = [each for name, each in arguments.items() if self.hides(tool, name)]
        self.secrets.add(arguments)

    def know_result(self, tool: str, content: Any, payload: Mapping[str, Any] = {}) -> None:
        """Add the sensitive values of a result to the known values."""
        self.secrets.add(sensitive_parts(content, payload, self.results_of.get(tool, ())))

    # Its parts

    def _member(self, row: Row, name: str, value: Any) -> Any:
        if name == "calls" and isinstance(value, list):
            return [self._call(each) if isinstance(each, dict) else each for each in value]
        if name in ("content", "left_out") and row.kind == events.ASSISTANT and isinstance(value, list):
            return [self._block(each) if isinstance(each, dict) else self.value(each) for each in value]
        if name in ("arguments", "edited"):
            return self.arguments(row.tool_name, value)
        if name in ("content", "result") and row.kind in _RESULTS and not _is_told(row):
            return self._result(row, value)
        if name in ("raised", "evidence") and row.tool_name in self.results_of and row.kind in _WORKED:
            return MASK
        if name in ("preview", "title"):
            return self.made(row.tool_name, value)
        if name in _KEPT or name in facts_of(row.kind):
            return value
        show = self.value if row.kind in _MADE else self.said
        return show(value, row.tool_name)

    def _errors(self, row: Row) -> list[str]:
        """List the error texts of a handler with sensitive results, because an error may quote its data."""
        if row.tool_name not in self.results_of or not row.attempt or _is_told(row):
            return []
        found = [row.payload.get("raised"), row.payload.get("content") if row.payload.get("is_error") else ""]
        return [text for text in found if isinstance(text, str) and text]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        tool = str(call.get("tool"))
        shown = {**call, "arguments": self.arguments(tool, call.get("arguments"))}
        if isinstance(call.get("original"), dict):
            shown["original"] = {
                name: MASK if self.names(tool) and name == "input" else self.value(each)
                for name, each in call["original"].items()
            }
        return shown

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        tool = str(block.get("name"))
        return {
            name: self.arguments(tool, each)
            if name == "input"
            else (each if name in _BLOCK_FACTS else self.value(each))
            for name, each in block.items()
        }

    def _result(self, row: Row, content: Any) -> Any:
        names = self.results_of.get(row.tool_name, ())
        if content in self._errors(row):
            kind, _said, effect = _words(content)
            return f"{kind}: {MASK}{effect}"
        if not names or row.payload.get("is_error"):
            return self.value(content, row.tool_name)
        # The row of a stored result has only a preview, a text in which no member can be found.
        if "*" in names or not _has_members(content) or payloads.has_blocks(row.payload):
            return MASK
        return self.value(self._named(content, names), row.tool_name)

    def _named(self, value: Any, names: Collection[str]) -> Any:
        if isinstance(value, dict):
            return {name: MASK if name in names else self._named(each, names) for name, each in value.items()}
        return [self._named(each, names) for each in value] if isinstance(value, list) else value

    def _copy(self, shown: Any, texts: Mapping[str, Callable[[Any], Any]]) -> Any:
        made, deferred = copy.copy(shown), shown.get_deferred_fields()
        made._state = copy.copy(shown._state)
        for name, mask in texts.items():
            if name not in deferred:
                setattr(made, name, mask(getattr(shown, name)))
        return made


NOTHING = Mask()


def mask_of(run: Run) -> Mask:
    """Build the mask of a run from all runs of its session, because they share one conversation."""
    return masks_of([run])[run.session_id]


def masks_of(runs: Iterable[Run], most: int | None = None, size: int | None = None) -> Mapping[UUID, Mask]:
    """Build the masks of the sessions of several runs, by session id.

    Takes two queries, or one if nothing is sensitive, and another for definitions without an agent in this
    process. Masks of forks know the values of their origins. A `Blind` mask, which hides every text, is
    built for a session whose rows cannot be read; for all sessions if they have `most` rows or more; and for
    the largest sessions if the rows exceed `size` characters, which takes one more query.
    """
    runs = list(runs)
    try:
        return _masks_of(runs, most, size)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        sessions = {run.session_id for run in runs}
        if len(sessions) > 1:  # the others are read as ever
            return {key: masks_of(run for run in runs if run.session_id == key)[key] for key in sessions}
        bodies = definition_bodies(settings.DATABASE, {run.definition_id for run in runs}).values()
        return {key: Blind(bodies) if Mask(bodies) else Mask() for key in sessions}


class Blind(Mask):
    """The mask of a session whose sensitive values are unknown: it hides every text."""

    def __bool__(self) -> bool:
        return True

    def value(self, value: Any, tool: str = "") -> Any:
        """Replace any value by the mask, except None and ""."""
        return MASK if value not in (None, "") else value

    def said(self, value: Any, tool: str = "") -> Any:
        """Replace a value by the mask; a dict becomes a dict with one mask as name and value."""
        if isinstance(value, dict):
            return {MASK: MASK} if value else {}
        return self.value(value)

    def text(self, text: Any) -> Any:
        """Replace any text by the mask; None stays None."""
        return self.value(text)


def _masks_of(
    runs: Iterable[Run], most: int | None, size: int | None, generations: int = GENERATIONS
) -> Mapping[UUID, Mask]:
    named: dict[UUID, set[str]] = defaultdict(set)
    for run in runs:
        named[run.session_id].add(run.definition_id)
    rows = Message.objects.using(settings.DATABASE).filter(session_id__in=named).order_by()
    naming = list(rows.filter(kind__in=NAMING).values_list("session_id", "facts")[:most])
    if len(naming) == most:
        return {key: Blind() for key in named}
    origins: dict[UUID, set[str]] = defaultdict(set)
    for session, facts in naming:
        named[session] |= definitions_in(facts)
        if origin := facts.get("origin"):
            origins[session].add(origin["run"])
    bodies = definition_bodies(settings.DATABASE, set().union(*named.values()))
    found = {key: Mask(bodies[one] for one in its if one in bodies) for key, its in named.items()}
    if sensitive := [key for key, mask in found.items() if mask]:
        held = rows.filter(kind__in=_HOLDING, session_id__in=sensitive)
        for session in _too_large(held, size):
            found[session] = Blind(bodies[one] for one in named[session] if one in bodies)
            held = held.exclude(session_id=session)
        values_of = held.values_list("session_id", *COLUMNS)
        for count, (session, *values) in enumerate(values_of[:most].iterator(chunk_size=500), start=1):
            if count == most:
                return {key: Blind() for key in named}
            found[session].learn(row_of(values))
        named_by = {key: origins[key] for key in sensitive if origins[key]}
        if not named_by or not generations:
            return found
        # A session has the same task as the session that it was forked from or that it repeats.
        befores = Run.objects.using(settings.DATABASE).filter(pk__in=set().union(*named_by.values()))
        before = {str(run.pk): run for run in befores.only("session_id", "definition_id")}
        others = {run.session_id: run for run in before.values() if run.session_id not in found}
        known = {**found, **_masks_of(others.values(), most, size, generations - 1)} if others else found
        for key, its in sorted(named_by.items()):  # the older first: it may be the origin of the next
            for mask in (known[before[one].session_id] for one in its if one in before):
                if isinstance(mask, Blind):
                    found[key] = mask
                found[key].secrets.update(mask.secrets)
    return found


@contextmanager
def veiling(*about: Any) -> Iterator[bool]:
    """Hide the sensitive values of approvals and runs in log records; yield whether all values are known."""
    hidden = Secrets()
    try:
        hidden.update(secrets() or hidden)
        approvals = [one for one in about if isinstance(one, Approval)]
        masks = masks_of([one for one in about if isinstance(one, Run)] + [one.run for one in approvals])
        for one in approvals:
            for arguments in _dicts([*about]):  # of an edit
                masks[one.run.session_id].know(one.tool_name, arguments)
        for mask in masks.values():
            hidden.update(mask.secrets)
        is_known = not any(isinstance(mask, Blind) for mask in masks.values())
    except Exception:  # such as in a transaction that the project's code broke
        is_known = False
    with hiding(hidden):
        yield is_known


def _too_large(rows: QuerySet[Message], size: int | None) -> list[UUID]:
    """List the largest sessions, whose rows do not fit into `size` characters after the smaller sessions."""
    if size is None:
        return []
    of_each = rows.values_list("session_id").annotate(size=Sum(Length("content"), default=0))
    sums = sorted(of_each, key=itemgetter(1))
    totals = accumulate(each for _, each in sums)
    return [session for (session, _), total in zip(sums, totals, strict=True) if total > size]


def masked_approvals(approvals: Iterable[Approval], most: int | None = None) -> list[Approval]:
    """Mask approvals that were read together with their runs; `most` as in `masks_of`."""
    approvals = list(approvals)
    masks = masks_of((one.run for one in approvals), most)
    return [masks[one.run.session_id].approval(one) for one in approvals]


def masked_runs(runs: Iterable[Run]) -> list[Run]:
    """Mask the texts of several runs.

    If their rows exceed MOST_READ characters, hides all texts of the largest sessions with sensitive values.
    """
    runs = list(runs)
    masks = masks_of(runs, size=MOST_READ)
    return [masks[run.session_id].run(run) for run in runs]


def _dicts(items: Any) -> Iterator[dict[str, Any]]:
    yield from (each for each in items if isinstance(each, dict)) if isinstance(items, list) else ()


def _is_told(row: Row) -> bool:
    return row.payload.get("outcome") in _TOLD


def _words(text: str) -> tuple[str, str, str]:
    """Split a stored error text into the exception's type, its message and the note about its effect."""
    effect = next((each for each in EFFECTS if text.endswith(each)), "")
    kind, _colon, words = text.removesuffix(effect).partition(": ")
    return kind, words, effect


def _has_members(content: Any) -> bool:
    return isinstance(content, dict) or (isinstance(content, list) and all(map(_has_members, content)))


def _without(value: Any, names: set[str]) -> Any:
    """Remove the members in `names` from an object, or from each object of a list."""
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if name not in names}


def sensitive_parts(content: Any, payload: Mapping[str, Any], names: Collection[str]) -> Any:
    """Select the sensitive parts of a result: the members in `names`, or all texts if there are blocks."""
    if names and payloads.has_blocks(payload) and isinstance(content, list):
        return [[block.get("text"), block.get("name")] for block in _dicts(content)]
    return members(content, names)


def members(content: Any, names: Collection[str]) -> Any:
    """Select the members of a result whose names are in `names`, at any depth; the whole result for "*"."""
    if "*" in names:
        return content
    if isinstance(content, dict):
        return [each if name in names else members(each, names) for name, each in content.items()]
    return [members(each, names) for each in content] if isinstance(content, list) else None


def carries_mask(edited: Any, name: str, original: dict[str, Any]) -> bool:
    """Check whether an edited argument contains a redaction mask from the text that the editor was shown."""
    if not is_on():
        return False
    kept = list(_texts(original.get(name)))
    changed = [(text, shown) for text in _texts(original) if (shown := redact(text)) != text]
    pieces = {piece for text, shown in changed for piece in _pieces(text, shown)}
    for text in _texts(edited):
        if text not in kept and any(text == shown for _text, shown in changed):
            return True
        if any(piece in text and not any(piece in one for one in kept) for piece in pieces):
            return True
    return False


def _texts(value: Any) -> Iterator[str]:
    """Yield every text and integer in a JSON value as text, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def _pieces(text: str, shown: str) -> Iterator[str]:
    """Yield the pieces of `shown` that replace something in `text`, or one piece if the texts are long."""
    if shown == FAILED:
        yield shown
        return
    before, after = _WORD.findall(text), _WORD.findall(shown)
    head = _common(before, after)
    before, after = before[head:][::-1], after[head:][::-1]
    tail = _common(before, after)
    before, after = before[tail:][::-1], after[tail:][::-1]
    found = ["".join(after)]
    if len(before) + len(after) <= MOST_COMPARED:
        steps = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        found = ["".join(after[start:end]) for kind, _i, _j, start, end in steps if kind != "equal"]
    yield from (piece for piece in found if len(piece) >= LEAST_MASK)


def _common(one: list[str], other: list[str]) -> int:
    """Count the equal elements at the start of two lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
