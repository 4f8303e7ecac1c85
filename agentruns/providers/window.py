"""The model's context window: estimate a request's size, and shorten a long conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from agentruns.providers.blocks import blocks_of, results_of
from agentruns.tools.excerpts import Bounds
from agentruns.utils import json as canonical
from agentruns.utils.bounds import LEAST_SENT

Messages = list[dict[str, Any]]
Compact = Callable[[Messages, int, int], Messages]

SMALLEST = 200_000  # tokens; no current model accepts fewer
TOKENS_OF_PICTURE = 5_000  # each is scaled down to fewer
LEAST_NOTE = 250  # characters; twice what the note about a left out result needs
BYTES_PER_TOKEN = 2  # fewer than in any real text, so that an estimate is never too low


def most_tokens(body: dict[str, Any]) -> int:
    """Estimate an upper bound on the tokens of a request, without a query to the provider."""
    pictures = [block["source"].get("data", "") for block in _pictures(body.get("messages"))]
    size = len(canonical.dumps(body).encode()) - sum(map(len, pictures))
    return size // BYTES_PER_TOKEN + len(pictures) * TOKENS_OF_PICTURE


def _pictures(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the pictures in messages and results, because their size in bytes does not show their tokens."""
    for block in content if isinstance(content, list) else []:
        if block.get("type") == "image" and isinstance(block.get("source"), dict):
            yield block
        yield from _pictures(block.get("content"))


def exchanges(messages: Messages) -> list[Messages]:
    """Split a conversation into parts, each of which keeps calls and their results together.

    The first part is the user's opening; every other part begins with a reply and can be left out.
    Consecutive replies stay together, because they are one reply that paused and continued.
    """
    parts: list[Messages] = []
    for message in messages:
        if not parts or (message["role"] == "assistant" and parts[-1][-1]["role"] != "assistant"):
            parts.append([])
        parts[-1].append(message)
    return parts


def drop_oldest(messages: Messages, tokens: int, limit: int) -> Messages:
    """Leave out the oldest exchanges of a conversation that is too long; for `AnthropicModel(compact=...)`.

    First shortens results of tools to a quarter of `limit`, in characters. Then leaves out exchanges without
    a message of the user, then the others; the opening, the user's last message and the newest exchange stay.
    At last shortens these results still more. `tokens` is the size of the whole conversation; each part is
    assumed to take a share proportional to its length. Aims at 80 % of `limit`. The journal keeps everything.
    """
    share = tokens / most_tokens({"messages": messages})
    most = max(limit // 4, LEAST_SENT)
    parts = exchanges(Bounds(most).apply(messages))
    sizes = [most_tokens({"messages": part}) * share for part in parts]
    spoken = [
        number
        for number, part in enumerate(parts)
        if any(message["role"] == "user" and results_of(message)[1] for message in part)
    ]
    needed = {0, len(parts) - 1, *spoken[-1:]}
    droppable = [number for number in range(len(parts)) if number not in needed]
    excess = sum(sizes) - limit * 0.8  # shares are estimates, and tools and system take room as well
    dropped = set()
    for number in sorted(droppable, key=lambda number: (number in spoken, number)):
        if excess <= 0:
            break
        excess -= sizes[number]
        dropped.add(number)
    kept = [message for number, part in enumerate(parts) if number not in dropped for message in part]
    while most_tokens({"messages": kept}) * share > limit * 0.8 and most > LEAST_NOTE:
        most //= 2
        kept = Bounds(most).apply(kept)
    return kept


def broken_pairs(messages: Any, whole: Messages) -> str:
    """Explain why a shortened conversation cannot be sent instead of the `whole` one; "" if it can.

    Checks its form, that each call has its result, and that it ends as the whole one does.
    """
    for message in messages if isinstance(messages, list) else [None]:
        known: dict[str, Any] = message if isinstance(message, dict) else {}
        content = known.get("content")
        are_blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
        if not (isinstance(content, str) or are_blocks) or known.get("role") not in ("user", "assistant"):
            return "it is not a list of messages, each with a role and a content"
    if not messages or messages[0]["role"] != "user":
        return "it does not begin with a user message"
    open_calls: set[str] = set()
    for message in messages:
        answered = _ids(message, "tool_result", "tool_use_id")
        if message["role"] == "user" and answered != open_calls:
            return "a tool_use and its tool_result were parted"
        if message["role"] == "assistant" and open_calls:
            return "a tool_use has no tool_result after it"
        open_calls = _ids(message, "tool_use", "id") if message["role"] == "assistant" else set()
    if open_calls:
        return "the last tool_use has no tool_result"
    # A model that does not see what it has done does it again.
    first, last = messages[-1], whole[-1]
    same = _ids(first, "tool_result", "tool_use_id") == _ids(last, "tool_result", "tool_use_id")
    return "" if same and first["role"] == last["role"] else "it does not end as the whole one does"


def _ids(message: dict[str, Any], kind: str, field: str) -> set[str]:
    return {str(block.get(field)) for block in blocks_of(message) if block.get("type") == kind}
