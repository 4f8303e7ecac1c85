"""The conversation of a session: its rows as the messages that a provider receives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from agentruns.content import placeholder
from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.providers import attachments
from agentruns.providers.attachments import DEFAULT, Limits
from agentruns.providers.blocks import GONE, is_private
from agentruns.tools.excerpts import BLOCK, UNBOUNDED, Bounds, results_in, size_of, texts_of
from agentruns.utils import json as canonical

EDITED = "Executed with the arguments a person set: {arguments}\n"
MISFIT = "The tool ran. Its result is not of the declared form ({misfit}):\n"
REFUSED = ("refusal", "content_filter")
UNANSWERED = "[Left out: the provider refused to answer this.]"
UNREAD_RESULT = "[This call has ended. Its result is left out: the provider refused to read it.]"
NAMED = 20  # results in an error
BOUND = 2000  # characters of each result once the provider has refused the conversation
# Around a message from the program. `unmarked` takes the brackets, and those like them, from all other texts
# but those that a provider signed, and files.
PROGRAM = "⟦Message from the program, not from the user. No message of the user contains these brackets.⟧"
PROGRAM_ENDS = "⟦End of the message from the program.⟧"
UNMARKED = str.maketrans("⟦⟧〚〛⟬⟭⦋⦌\u2772\u2773⁅⁆", "[]" * 6)
KEPT = 64 * 2**20  # bytes of files that a driver keeps in memory between requests

Block = dict[str, Any]
Blocks = list[Block]
Previews = dict[tuple[int, int], "_Whole"]  # (message, block in it) -> the full content


class Conversation:
    """The messages of a session for its provider, built from the session's rows in order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []  # without what was left out
        self._places: dict[tuple[int, int], int] = {}  # (message, block in it; -1: a reply) -> its row
        self.tool_use_ids: set[str] = set()
        self._messages: list[dict[str, Any]] = []  # up to the last reply
        self._unread: list[_Said] = []  # contents of `user` rows that no reply has read
        self._task = "", 0, 0  # the last run with a reply; the message and the block where its task begins
        self._is_cut = False  # whether the provider cut the last reply off and the next continues it
        self._digests = [""]  # digests of the messages up to each, except the last, which may still grow
        self._previews: Previews = {}
        self._stored: dict[str, _Whole] = {}  # call -> full content of a result that is in no message yet
        self._kept = 0
        self._open: dict[str, str] = {}  # call -> provider's id, of the last reply
        self._results: dict[str, dict[str, Any]] = {}
        self._most = 0  # the results of no reply have more characters together
        self._bounded: dict[str, int] = {}  # provider's id -> characters of the result in a refused request
        self._seqs: dict[str, int] = {}  # of the rows of these results

    def apply(self, row: Row) -> None:
        """Add one more row of the session's journal to the messages; skip kinds that a model does not see."""
        if row.kind == events.LEFT_OUT:
            rows = [without(each, row.payload, home_of(row)) for each in self.rows]
            self.__init__()  # type: ignore[misc] # later rows may build on those that change
            for each in rows:
                self.apply(each)
        elif row.kind in _APPLY:
            self.rows.append(row)
            _APPLY[row.kind](self, row, row.payload)

    def is_shorter_after(self, omission: events.LeftOut, home: str) -> bool:
        """Check whether a `left_out` row of the run `home` would change a row of the conversation."""
        return any(without(row, omission, home) is not row for row in self.rows)

    def row_at(self, message: int, block: int) -> int | None:
        """Find the seq of the row from which a block of the next request comes; None if unknown."""
        return self._places.get((message, block), self._places.get((message, -1)))

    def messages(
        self, read: int | None = None, limits: Limits = DEFAULT, bounds: Bounds = UNBOUNDED
    ) -> list[dict[str, Any]]:
        """Build the messages of the next request, or of an old request that had read the rows up to `read`.

        Raises AssertionError if a call of the last reply has no result. Reads contents from their files, and
        raises PayloadError if a file is missing, altered or out of reach. If the files exceed `limits`, the
        oldest stay previews. A file that the provider does not accept stays a preview, too. A result beyond
        `bounds` becomes an excerpt here, but not for `settled_messages` and `fingerprint`.
        """
        if len(self._results) < len(self._open):
            missing = sorted(self._open.keys() - self._results.keys())
            raise AssertionError(f"Calls {missing} have no result; no request may be built.")
        messages, previews = self._so_far(read)
        room = attachments.Room(limits)
        for (number, place), whole in reversed(previews.items()):  # the newest first
            attached = attachments.fitting(whole.files, limits)
            if not room.take(attached):
                continue
            content = list(messages[number]["content"])
            block = whole.block
            if block is None:
                block = unmarked(whole.read(attached, limits))
                if self._kept + whole.size <= KEPT:
                    self._kept += whole.size
                    whole.block = block
            content[place] = block
            messages[number] = {**messages[number], "content": content}
        most = None if previews else self._most
        sent, least = bounds.apply(messages, most), min(self._bounded.values(), default=None)
        for number, message in enumerate(bounds.at_most(least).apply(messages) if least else ()):
            pairs = zip(message["content"], sent[number]["content"], strict=True)
            kept = [small if small.get("tool_use_id") in self._bounded else block for small, block in pairs]
            sent[number] = {**message, "content": kept}
        return sent

    def result(self, id: str, tools: Collection[str]) -> str:
        """Read the whole text of a result of one of `tools`, if the model was sent it; describe its files.

        `id` is that of its `tool_use`. Raises LookupError, which names the results that can be read, and
        PayloadError as `messages`.
        """
        messages, previews = self._so_far(None)
        found: dict[str, Block | _Whole] = {}
        for number, place, tool in results_in(messages):
            if tool in tools:
                result = messages[number]["content"][place]
                found[result["tool_use_id"]] = previews.get((number, place), result)
        if id not in found:
            known = ", ".join([*found][-NAMED:]) or "none"
            raise LookupError(f"This session has no result {id!r} to read. The last that it has: {known}.")
        block = found[id]
        return "\n".join(texts_of(block.read([], DEFAULT) if isinstance(block, _Whole) else block))

    def settled_messages(self, read: int | None = None) -> list[dict[str, Any]]:
        """Build the messages so far; if a call of the last reply has no result yet, end with that reply.

        Reads no file: a content stored in a file appears as its preview. `read` as in `messages`.
        """
        return self._so_far(read)[0]

    def fingerprint(self, read: int | None = None) -> str:
        """Compute a digest of the messages so far; `read` as in `messages`. Hashes old messages once."""
        messages = self.settled_messages(read)
        for message in self._messages[len(self._digests) - 1 : -1]:
            self._digests.append(canonical.digest([self._digests[-1], message]))
        digest = self._digests[-1]
        for message in messages[len(self._digests) - 1 : -1]:
            digest = canonical.digest([digest, message])
        return canonical.digest([digest, messages[-1:]])

    def held_back(self) -> int | None:
        """Find the seq of the first row that the next request must not send yet; None if it sends all rows.

        If the provider cut a reply off (`pause_turn`), the next request sends that reply back unchanged.
        Messages wait until the provider has sent the other part of the reply. After a new task nothing waits,
        because nobody needs that part any more.
        """
        holds = self._is_cut and all(unread.is_message for unread in self._unread)
        return self._unread[0].seq if holds and self._unread else None

    def _so_far(self, read: int | None) -> tuple[list[dict[str, Any]], Previews]:
        self._flush()
        messages, previews = list(self._messages), dict(self._previews)
        self._add_unread(messages, previews, read)
        return messages, previews

    def _add_unread(self, messages: Blocks, previews: Previews, read: int | None) -> None:
        if not self._open and self.held_back() is None:
            for unread in self._unread:
                if read is not None and unread.seq > read:
                    continue
                # The user's blocks join the last message if that is the user's.
                before = messages.pop()["content"] if messages and messages[-1]["role"] == "user" else []
                if messages is self._messages and unread.run != self._task[0]:
                    self._task = unread.run, len(messages), len(before)
                for place, whole in unread.wholes.items():
                    previews[len(messages), len(before) + place] = whole
                for place in range(len(unread.blocks)):
                    self._places[len(messages), len(before) + place] = unread.seq
                messages.append({"role": "user", "content": [*before, *unread.blocks]})

    def _user(self, row: Row, payload: events.User) -> None:
        is_message = payload.get("reason") == events.MESSAGE
        blocks, wholes = [*map(described, payload["content"])], dict[int, _Whole]()
        for place, block in enumerate(payload["content"]):
            if "sha256" in block:
                wholes[place] = _Whole([block], block["size"], partial(_loaded, row, block))
        stored = payload.get("stored")
        if isinstance(stored, dict):
            said = partial(payloads.said_in, row.run_id, row.seq, row.payload)
            wholes[0] = _Whole(
                [], stored["size"], lambda *_: canonical.legal({"type": "text", "text": said()})
            )
        if about := payload.get("about"):
            blocks.append({"type": "text", "text": about["detail"]})
        blocks = unmarked(canonical.legal(blocks))
        if "actor" in payload and not (payload["actor"] or events.PROGRAM)["id"]:
            wholes = {place + 1: whole for place, whole in wholes.items()}
            blocks = [{"type": "text", "text": PROGRAM}, *blocks, {"type": "text", "text": PROGRAM_ENDS}]
        self._unread.append(_Said(row.seq, home_of(row), is_message, blocks, wholes))

    def _assistant(self, row: Row, payload: events.Assistant) -> None:
        self._flush()
        read = payload.get("read", row.seq)
        self._add_unread(self._messages, self._previews, read)
        self._unread = [said for said in self._unread if said.seq > read]
        self._is_cut = payload.get("stop_reason") == "pause_turn"
        said = [
            unmarked(block) if block.get("type") in ("text", "tool_use") else block
            for block in payload["content"]
            if block.get("type") != "text" or str(block.get("text", "")).strip()
        ]
        # Text comes before the first `tool_use`: the provider refuses text after one.
        first = next((n for n, block in enumerate(said) if block.get("type") == "tool_use"), len(said))
        content = said[:first] + sorted(said[first:], key=lambda block: block.get("type") != "text")
        if payload.get("stop_reason") in REFUSED:  # it would refuse each later request, too
            self._leave_out_task()
            # Claude wants thinking back beside its calls.
            kept = [block for block in content if block.get("type") == "tool_use" or is_private(block)]
            content = kept if payload["calls"] else []
        if content:  # the provider refuses an empty assistant turn
            self._places[len(self._messages), -1] = row.seq
            self._messages.append({"role": "assistant", "content": canonical.legal(content)})
        self._open = {call["id"]: call["provider_id"] for call in payload["calls"]}
        self.tool_use_ids.update(self._open.values())

    def _leave_out_task(self) -> None:
        """Replace what users and tools said in the last run; its calls stay, so that none is repeated."""
        _run, start, first = self._task
        for number, message in enumerate(self._messages[start:], start):
            if message["role"] == "user":
                kept = message["content"][: first if number == start else 0]
                left = message["content"][len(kept) :]
                results = [block for block in left if block["type"] == "tool_result"]
                content = [*kept, *({**block, "content": UNREAD_RESULT} for block in results)]
                if len(results) < len(left):
                    content.append({"type": "text", "text": UNANSWERED})
                self._messages[number] = {**message, "content": content}
        self._previews = {at: whole for at, whole in self._previews.items() if at < (start, first)}
        self._places = {at: seq for at, seq in self._places.items() if at < (start, first)}
        del self._digests[start + 1 :]

    def _tool_result(self, row: Row, payload: events.ToolResult) -> None:
        provider_id = self._open.get(row.call_id)
        if provider_id is None:
            return
        self._results[row.call_id] = unmarked(result_block(provider_id, payload))
        self._seqs[row.call_id] = row.seq
        if "bounded" in row.payload:  # by an omission
            self._bounded[provider_id] = row.payload["bounded"]
        if stored := payload.get("stored"):
            is_list = isinstance(stored, list)
            named = [block for block in payload["content"] if "sha256" in block] if is_list else []
            size = sum(file["size"] for file in (stored if isinstance(stored, list) else [stored]))
            self._stored[row.call_id] = _Whole(named, size, partial(_whole_result, row, provider_id))

    def _flush(self) -> None:
        """Append the last reply's results, in call order, as a user message once every call has a result."""
        if self._open and len(self._results) == len(self._open):
            for place, call_id in enumerate(self._open):
                self._places[len(self._messages), place] = self._seqs[call_id]
                if call_id in self._stored:
                    self._previews[len(self._messages), place] = self._stored[call_id]
            results = [self._results[call_id] for call_id in self._open]
            self._most = max(self._most, sum(size_of(each) + BLOCK for each in results))
            self._messages.append({"role": "user", "content": results})
            self._open, self._results, self._stored = {}, {}, {}


_APPLY: dict[str, Callable[[Conversation, Row, Any], None]] = {
    events.USER: Conversation._user,
    events.ASSISTANT: Conversation._assistant,
    events.TOOL_RESULT: Conversation._tool_result,
}
KINDS = frozenset(_APPLY)  # kinds of the rows that the model sees


# Omissions: requests get the rows before a `left_out` row in another form. The journal keeps the rows.


def home_of(row: Row) -> str:
    """Find the id of the run that wrote a row, also if a fork copied the row."""
    return str(row.payload.get(events.COPIED, {}).get("run", row.run_id))


def without(row: Row, omission: events.LeftOut, home: str) -> Row:
    """Copy a row of the conversation without the part that `omission` leaves out; else return `row` itself.

    `home` is the run that wrote the `left_out` row. A reply keeps its calls without their arguments,
    because each result needs its call.
    """
    if "bound" in omission:
        return _shorter(row, omission["bound"], is_old=home_of(row) != home)
    first, place = omission.get("seq", 0), omission.get("block")
    if not first <= row.seq <= omission.get("until", first):
        return row
    content, note = row.payload["content"], {"type": "text", "text": GONE}
    if row.kind == events.ASSISTANT:
        calls = [{**block, "input": {}} for block in content if block.get("type") == "tool_use"]
        is_cut = row.payload.get("stop_reason") == "pause_turn"  # after which no text of a reply may come
        return _with(row, calls if is_cut else [note, *calls])
    if place is not None and isinstance(content, list):
        return _with(row, [*content[:place], note, *content[place + 1 :]], keeps_files=True)
    return _with(row, GONE if row.kind == events.TOOL_RESULT else [note])


def has_block(row: Row, place: int | None) -> bool:
    """Check whether a part of a row can be left out: all of it, or a block of what a user or a tool gave."""
    content = row.payload["content"] if row.kind != events.ASSISTANT else ()
    return place is None or (isinstance(content, list) and 0 <= place < len(content))


def _shorter(row: Row, bound: int, *, is_old: bool) -> Row:
    """Mark a long result as bounded, describe files, and leave out reasoning of earlier runs."""
    payload, content = row.payload, row.payload["content"]
    if row.kind == events.ASSISTANT:
        is_old = is_old or "fallback" in payload
        kept = [block for block in content if not (is_old and is_private(block))]
        return row if kept == content else _with(row, kept)
    if isinstance(content, list) and isinstance(payload.get("stored"), list):
        is_text = row.kind == events.TOOL_RESULT  # whose long texts stay stored until they are cut
        blocks = [each if is_text and each["type"] == "text" else described(each) for each in content]
        row = row if blocks == content else _with(row, blocks, keeps_files=True)
    stored = payload.get("stored") or []
    texts = [each for each in (stored if isinstance(stored, list) else [stored]) if each["form"] != "bytes"]
    is_long = bool(texts) or len(canonical.dumps(content)) > bound
    if row.kind != events.TOOL_RESULT or not is_long or "bounded" in payload:
        return row
    return row._replace(payload={**row.payload, "bounded": bound})


def described(block: dict[str, Any]) -> dict[str, Any]:
    """Replace a block's file by a text that describes the file; keep a text block's own preview."""
    if block.get("type") == "text" or "sha256" not in block:
        return {name: value for name, value in block.items() if name not in ("sha256", "size")}
    return {"type": "text", "text": placeholder(block, block["sha256"])}


def _with(row: Row, content: Any, *, keeps_files: bool = False) -> Row:
    gone = () if keeps_files else ("stored", "about")
    payload = {name: each for name, each in row.payload.items() if name not in gone}
    return row._replace(payload={**payload, "content": content})


def unmarked(value: Any) -> Any:
    """Replace the brackets around the program's messages in all texts of a JSON value."""
    if isinstance(value, str):
        return value if value.isascii() else value.translate(UNMARKED)
    if isinstance(value, dict):
        ids = ("id", "tool_use_id")
        return {unmarked(name): each if name in ids else unmarked(each) for name, each in value.items()}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def unread_after(unread: list[int], row: Row) -> list[int]:
    """Compute the seqs of unread messages after one more row: add a message, or remove read messages."""
    if (said := events.USER.of(row)) and said.get("reason") == events.MESSAGE:
        return [*unread, row.seq]
    reply = events.ASSISTANT.of(row)
    read = reply.get("read", row.seq) if reply else 0
    return [seq for seq in unread if seq > read]


class _Said(NamedTuple):
    """The content of a `user` row that no reply has read."""

    seq: int
    run: str  # of a copied row its origin
    is_message: bool
    blocks: Blocks
    wholes: dict[int, _Whole]  # by the place of their preview


class _Whole:
    """The full content behind a preview in the conversation; `named` are its blocks that name a file."""

    def __init__(self, named: Blocks, size: int, read: Callable[[Blocks, Limits], Block]) -> None:
        self.files = [block for block in named if block["type"] != "text"]
        self.size = size
        self.read = read  # called with the blocks whose files are sent, and the limits; raises PayloadError
        self.block: Block | None = None  # once it is read


def _loaded(row: Row, block: Block, attached: Blocks, limits: Limits) -> Block:
    """Convert a row's block for the provider, with the file of a text or of an `attached` block."""
    is_sent = block["type"] == "text" or any(block is each for each in attached)
    if "sha256" not in block or not is_sent:
        refusal = None if block["type"] == "text" else attachments.refusal_of(block, limits)
        preview = described(block)
        return {**preview, "text": f"{preview['text']} is left out. {refusal}"} if refusal else preview
    stored = payloads.file_of(row.run_id, row.seq, row.payload, block["sha256"])
    if block["type"] == "text":
        return dict(canonical.legal({"type": "text", "text": payloads.content_of(stored)}))
    return attachments.block_of(block, b"".join(payloads.chunks(stored)))


def _whole_result(row: Row, provider_id: str, attached: Blocks, limits: Limits) -> Block:
    if payloads.has_blocks(row.payload):
        return result_block(provider_id, row.payload, lambda block: _loaded(row, block, attached, limits))
    content = payloads.whole(row.run_id, row.seq, row.payload)
    return result_block(provider_id, row.payload | {"content": content})


def result_block(
    provider_id: str, payload: events.ToolResult, show: Callable[[Block], Block] = described
) -> Block:
    """Build the provider's `tool_result` block for a row's payload; `show` converts the blocks inside."""
    content, note = payload["content"], ""
    if payload.get("edited") is not None:
        note = EDITED.format(arguments=canonical.legal_text(payload["edited"]))
    if payload.get("misfit"):
        note += MISFIT.format(misfit=payload["misfit"])
    legal: Any
    if payloads.has_blocks(payload):
        first = [{"type": "text", "text": note}] if note else []
        legal = canonical.legal([*first, *map(show, content)])
    else:
        text = content if isinstance(content, str) else canonical.legal_text(content)
        legal = canonical.legal(note + text)
    block = {"type": "tool_result", "tool_use_id": provider_id, "content": legal or "(no output)"}
    return {**block, "is_error": True} if payload["is_error"] else block
