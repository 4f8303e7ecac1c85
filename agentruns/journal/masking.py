"""Masks that hide sensitive values in rows, runs, approvals and results from people who may not reveal them.

A tool names sensitive arguments (`sensitive`) and parts of its result (`sensitive_results`). A mask hides
these, and their exact values in all other texts and numbers of the session, such as previews and answers of
the model. EXITS in tests/masks/exits.py lists all places that show data.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any
from uuid import UUID

from django.db.models import Sum
from django.db.models.functions import Length

from agentruns.conf import settings
from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.journal.read import COLUMNS, NAMING, definition_bodies, definitions_in, row_of
from agentruns.models import Approval, Message, Run
from agentruns.models.kinds import form_of
from agentruns.models.statuses import Outcome
from agentruns.tools.card import MASK
from agentruns.tools.refusals import EFFECTS
from agentruns.utils.redaction import Secrets, hiding, is_on, redact, secrets

LEAST_MASK = 3  # characters; shorter words also occur in texts that carry no mask
MOST_WORDS = 100  # of masks in an edit; so many come from a redacted text
MOST_ROWS = 5_000  # read at most for the few runs on a front page
MOST_READ = 2_000_000  # characters of rows for the masks of one list

_KEPT = frozenset(("stored", "sent"))  # content that holds no text by a model, a tool or a person
_BLOCK_KEPT = frozenset(("type", "id", "tool_use_id", "name", "is_error", "input"))  # `input` is masked apart
_RESULTS = (events.TOOL_RESULT, events.LATE_RESULT, events.ORPHAN_RESOLVED)
_WORKED = (events.ORPHAN_FOUND, *_RESULTS)  # rows about what a handler did
_HOLDING = (events.ASSISTANT, events.APPROVAL_DECIDED, *_WORKED)  # rows that hold sensitive values
_AWAITED = (events.EVENT_AWAITED, events.EVENT_DELIVERED)
_TOLD = [each for each in Outcome if each not in (Outcome.OK, Outcome.ERROR)]  # whose text no tool wrote

_WORD = re.compile(r"\w+|(\W)\1*")  # such as `XXXX` or `***`
_MASKED = re.compile(rf"\[[\w .:-]+\]|<[\w .:-]+>|{_WORD.pattern}")  # `[card]` is one word, too


class Mask:
    """The sensitive names of one session by tool, and their values in the session's rows.

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
        """Check whether a tool's stored file may hold a sensitive value, or a text that redaction hides."""
        return is_on() or self.guards(tool) or bool(self.secrets)

    def guards_block(self, tool: str, block: dict[str, Any]) -> bool:
        """Check whether a block's file may hold a text to hide; for an image only `guards` decides."""
        return self.guards(tool) if block.get("type") == "image" else self.guards_file(tool)

    # Masks of whole objects

    def row(self, row: Row) -> Row:
        """Mask a journal row, and remove the hashes and data that would reveal its stored files."""
        stored = row.payload.get("stored")
        if "key_hash" in row.payload:  # equal for equal keys, so that one could try keys of one's own
            row = row._replace(payload=_without(row.payload, {"key_hash"}))
        if stored is not None:
            # The hash of a file whose beginning is shown would let people guess the rest.
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
        masked = {name: self._member(row, name, each) for name, each in row.payload.items()}
        return row._replace(payload=masked)

    def run(self, run: Run) -> Run:
        """Mask a run's texts in a copy that must never be saved; return the run if nothing is sensitive."""
        columns = ("idempotency_key", "input", "title", "context", "blocked_reason", "output", "error")
        return self._copy(run, dict.fromkeys(columns, self.json)) if self else run

    def approval(self, approval: Approval) -> Approval:
        """Mask an approval, and its run if loaded, in a copy that must never be saved; see also `run`."""
        if not self:
            return approval
        tool = approval.tool_name
        texts = dict.fromkeys(("why", "reason"), self.json)
        texts |= {"arguments": partial(self.arguments, tool)}
        texts |= dict.fromkeys(("title", "holds"), partial(self.tool_text, tool))
        shown: Approval = self._copy(approval, texts)
        if "run" in shown._state.fields_cache:
            shown._state.fields_cache = {**shown._state.fields_cache, "run": self.run(approval.run)}
        return shown

    def arguments(self, tool: str, arguments: Any) -> Any:
        """Mask a tool's sensitive arguments, and sensitive values that its other arguments repeat."""
        if not isinstance(arguments, dict):
            return MASK if self.names(tool) and arguments is not None else self.json(arguments)
        return {
            self.json(name): MASK if self.hides(tool, name) else self.json(each)
            for name, each in arguments.items()
        }

    def tool_text(self, tool: str, value: Any) -> Any:
        """Mask members with sensitive names, and sensitive values, in a tool's text, such as its title."""
        return self.json(self._named(value, self.names(tool)), tool)

    def json(self, value: Any, tool: str = "") -> Any:
        """Mask sensitive values in a JSON value; short values only if `tool` has sensitive arguments."""
        return self.secrets.walk(value, short=bool(self.names(tool))) if self else value

    # Values that the mask hides

    def learn(self, row: Row) -> None:
        """Add the sensitive values in a row to the values that the mask hides."""
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
            self.secrets.add(_error_parts(text)[1])

    def know(self, tool: str, arguments: Any) -> None:
        """Add the values of a call's sensitive arguments to the values that the mask hides."""
        if not self.names(tool):
            return
        if isinstance(arguments, dict):
            arguments = [each for name, each in arguments.items() if self.hides(tool, name)]
        self.secrets.add(arguments)

    def know_result(self, tool: str, content: Any, payload: Mapping[str, Any] = {}) -> None:
        """Add a result's sensitive values to the values that the mask hides; `payload` is its row's."""
        self.secrets.add(sensitive_parts(content, payload, self.results_of.get(tool, ())))

    # Parts of a row

    def _member(self, row: Row, name: str, value: Any) -> Any:
        if name == "calls" and isinstance(value, list):
            return [self._call(each) if isinstance(each, dict) else each for each in value]
        if name in ("content", "left_out") and row.kind == events.ASSISTANT and isinstance(value, list):
            return [self._block(each) if isinstance(each, dict) else self.json(each) for each in value]
        if name in ("arguments", "edited"):
            return self.arguments(row.tool_name, value)
        if name in ("content", "result") and row.kind in _RESULTS and not _is_told(row):
            return self._result(row, value)
        if name in ("raised", "evidence") and row.tool_name in self.results_of and row.kind in _WORKED:
            return MASK
        if name in ("preview", "title", "holds"):
            return self.tool_text(row.tool_name, value)
        is_made_by_tool = name == "key" and row.kind in _AWAITED  # perhaps of a sensitive argument
        if not is_made_by_tool and (name in _KEPT or name in form_of(row.kind).facts):
            return value
        return self.json(value, row.tool_name)

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
                name: MASK if self.names(tool) and name == "input" else self.json(each)
                for name, each in call["original"].items()
            }
        return shown

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        tool = str(block.get("name"))
        shown = {name: each if name in _BLOCK_KEPT else self.json(each) for name, each in block.items()}
        if "input" in block:
            shown["input"] = self.arguments(tool, block["input"])
        return shown

    def _result(self, row: Row, content: Any) -> Any:
        names = self.results_of.get(row.tool_name, ())
        if content in self._errors(row):
            kind, _said, effect = _error_parts(content)
            return f"{kind}: {MASK}{effect}"
        if not names or row.payload.get("is_error"):
            return self.json(content, row.tool_name)
        # The row of a stored result has only a preview, a text in which no member can be found.
        if "*" in names or not _has_members(content) or payloads.has_blocks(row.payload):
            return MASK
        return self.json(self._named(content, names), row.tool_name)

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


class Blind(Mask):
    """The mask of a session whose sensitive values are unknown, so that it hides every text."""

    def __bool__(self) -> bool:
        return True

    def json(self, value: Any, tool: str = "") -> Any:
        """Replace any value by the mask, except None and ""; a dict becomes {MASK: MASK}, or stays {}."""
        if isinstance(value, dict):
            return {MASK: MASK} if value else {}
        return MASK if value not in (None, "") else value


def mask_of(run: Run) -> Mask:
    """Build the mask of a run from all runs of its session, because they share one conversation."""
    return masks_of([run])[run.session_id]


def masks_of(runs: Iterable[Run], most: int | None = None, size: int | None = None) -> Mapping[UUID, Mask]:
    """Build the masks of the sessions of several runs, by session id.

    Makes two queries, or one if nothing is sensitive, and another for definitions without an agent in this
    process. A fork's mask knows the values in the rows that the fork has copied. A `Blind` mask, which hides
    every text, is built for a session with sensitive names whose rows cannot be read; for all sessions if
    `most` or more rows had to be read; and for the largest sessions if the rows exceed `size` characters. The
    check of `size` makes one more query.
    """
    runs = list(runs)
    try:
        return _masks_of(runs, most, size)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        sessions = {run.session_id for run in runs}
        if len(sessions) > 1:  # one unreadable session must not hide the other sessions
            return {key: masks_of(run for run in runs if run.session_id == key)[key] for key in sessions}
        bodies = definition_bodies(settings.DATABASE, {run.definition_id for run in runs}).values()
        return {key: Blind(bodies) if Mask(bodies) else Mask() for key in sessions}


def _masks_of(runs: Iterable[Run], most: int | None, size: int | None) -> Mapping[UUID, Mask]:
    named: dict[UUID, set[str]] = defaultdict(set)
    for run in runs:
        named[run.session_id].add(run.definition_id)
    rows = Message.objects.using(settings.DATABASE).filter(session_id__in=named).order_by()
    naming = list(rows.filter(kind__in=NAMING).values_list("session_id", "facts")[:most])
    if len(naming) == most:
        return {key: Blind() for key in named}
    for session, facts in naming:
        named[session] |= definitions_in(facts)
    bodies = definition_bodies(settings.DATABASE, set().union(*named.values()))
    found = {key: Mask(bodies[one] for one in its if one in bodies) for key, its in named.items()}
    if sensitive := [key for key, mask in found.items() if mask]:
        held = rows.filter(kind__in=_HOLDING, session_id__in=sensitive)
        if size is not None:
            total, of_each = 0, held.values_list("session_id")
            sums = of_each.annotate(size=Sum(Length("content"), default=0))
            for session, length in sorted(sums, key=itemgetter(1)):
                total += length
                if total > size:  # the largest sessions, after the smaller ones have been counted
                    found[session] = Blind(bodies[one] for one in named[session] if one in bodies)
                    held = held.exclude(session_id=session)
        values_of = held.values_list("session_id", *COLUMNS)
        for count, (session, *values) in enumerate(values_of[:most].iterator(chunk_size=500), start=1):
            if count == most:
                return {key: Blind() for key in named}
            found[session].learn(row_of(values))
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


def masked_approvals(approvals: Iterable[Approval]) -> list[Approval]:
    """Mask approvals that were read together with their runs."""
    approvals = list(approvals)
    masks = masks_of(one.run for one in approvals)
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


def _error_parts(text: str) -> tuple[str, str, str]:
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
    """Select the sensitive parts of a result: the members in `names`.

    In a result of content blocks, selects the text and the name of every block, unless `names` is empty.
    """
    if names and payloads.has_blocks(payload) and isinstance(content, list):
        return [[block.get("text"), block.get("name")] for block in _dicts(content)]
    return members(content, names)


def members(content: Any, names: Collection[str]) -> Any:
    """Collect the values of a result's members whose names are in `names`, at any depth.

    A dict becomes the list of its values. A value that is not selected becomes None. With "*", returns the
    result itself.
    """
    if "*" in names:
        return content
    if isinstance(content, dict):
        return [each if name in names else members(each, names) for name, each in content.items()]
    return [members(each, names) for each in content] if isinstance(content, list) else None


def carries_mask(edited: Any, name: str, original: dict[str, Any]) -> bool:
    """Check whether an edited argument contains a redaction mask from the texts that the editor was shown.

    Finds a redacted text as a whole, and each word of a mask that no true text contains. The words of a mask
    are those that a redacted text has and its true text lacks. More than MOST_WORDS of them count as a mask.
    False if nothing is redacted.
    """
    if not is_on():
        return False
    true = list(_texts(original))
    shown = {text: hidden for text in true if (hidden := redact(text)) != text}
    texts = {*_texts(edited)} - {*_texts(original.get(name))}
    if not texts.isdisjoint(shown.values()):
        return True
    words = set().union(*(_words(hidden, _MASKED) - _words(text, _WORD) for text, hidden in shown.items()))
    found = {word for text in texts for word in _words(text, _WORD, _MASKED) & words}
    found = {word for word in found if len(word) >= LEAST_MASK}
    return len(found) > MOST_WORDS or any(not any(word in text for text in true) for word in found)


def _words(text: str, *patterns: re.Pattern[str]) -> set[str]:
    return {match[0] for pattern in patterns for match in pattern.finditer(text)}


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
