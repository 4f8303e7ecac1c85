"""OpenAI's Chat Completions API, which many servers support: requests and replies as data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from agentruns.providers import blocks
from agentruns.providers.base import ModelReply, ModelRequest
from agentruns.providers.blocks import EXTRAS, ITEM, Block
from agentruns.providers.failures import answered

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "function_call": "tool_use", "length": "max_tokens"}
_COMPLETE = {*_STOPS} - {"length"}
# Texts that arrive in pieces; any other member of a delta comes complete, once or repeatedly.
_GROWING = frozenset({
    "content", "refusal", "reasoning", "reasoning_content", "text", "summary", "data",
})  # fmt: skip
_REASONING = ("reasoning_details", "reasoning", "reasoning_content")
_CALL = ("id", "index", "type", "function")
# In the open turn these models refuse another model's reply that lacks members of their own. Google documents
# this signature for such calls; DeepSeek and Kimi accept an empty reasoning.
_SIGNING, _REASONING_AGAIN = re.compile(r"gemini-([3-9]|\d\d)"), re.compile(r"deepseek|kimi")
_UNSIGNED = {"google": {"thought_signature": "skip_thought_signature_validator"}}


class Quirks(NamedTuple):
    """The differences between servers that support Chat Completions."""

    base_url: str | None = None
    key: str = "OPENAI_API_KEY"  # the environment variable with the key
    max_tokens: str = "max_tokens"
    # The member of a message with reasoning that the next request repeats; "": any; None: no member.
    takes_back: str | None = ""


OPENAI = Quirks(max_tokens="max_completion_tokens", takes_back=None)
QUIRKS = {
    "openai": OPENAI,
    "azure": OPENAI._replace(key="AZURE_OPENAI_API_KEY"),
    "ollama": Quirks("http://localhost:11434/v1", "OLLAMA_API_KEY", takes_back="reasoning"),
    "vllm": Quirks("http://localhost:8000/v1", "VLLM_API_KEY", takes_back="reasoning"),
    "openrouter": Quirks(
        "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", takes_back="reasoning_details"
    ),
}


def body(request: ModelRequest, params: dict[str, Any], identity: str, quirks: Quirks) -> dict[str, Any]:
    """Build the JSON of a request; raises ProviderError for a block that this model does not accept."""
    found = {quirks.max_tokens if name == "max_tokens" else name: each for name, each in params.items()}
    tools = [{"type": "function", "function": each} for each in blocks.functions(request)]
    if tools := [*tools, *params.get("tools", [])]:
        found["tools"] = tools
    if (form := blocks.answer_form(request)) is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    found["messages"] = [{"role": "system", "content": request.system}] if request.system else []
    turn = blocks.open_turn(request.messages)
    for place, message in enumerate(request.messages):
        if message["role"] != "assistant":
            asked, last = _asked(message, identity), found["messages"][-1:]
            if [each["role"] for each in (*last, *asked[:1])] == ["user", "user"]:  # templates want turns
                both = last[0]["content"], asked.pop(0)["content"]
                is_text = all(isinstance(content, str) for content in both)
                parts = [part for content in both for part in blocks.blocks_of({"content": content})]
                last[0]["content"] = "\n\n".join(both) if is_text else parts
            found["messages"] += asked
            continue
        texts, calls, extras = [], [], dict[str, Block]()
        reply: Block = {"role": "assistant", "content": None}
        for block in blocks.readable(blocks.blocks_of(message), lambda _block: False):
            if block["type"] == "text":
                texts.append(block["text"])
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
            elif block["type"] == ITEM and block["item"].get("type") == EXTRAS:
                if block["from"].partition(":")[0] == identity.partition(":")[0]:
                    extras[block["item"]["id"]] = block["item"]["extras"]
            elif block.get("from") == identity:
                # A server without a name of its own wants back what it sent, but only in the open turn.
                own = _REASONING if quirks.takes_back == "" and place >= turn else (str(quirks.takes_back),)
                reply |= {name: block["item"][name] for name in own if name in block["item"]}
        calls = [{**call, **extras.get(call["id"], {})} for call in calls]
        if calls and place >= turn and quirks.takes_back == "":
            if _SIGNING.search(identity):  # a reply's first call is signed for all of them
                calls[0].setdefault("extra_content", _UNSIGNED)
            elif _REASONING_AGAIN.search(identity) and not reply.keys() & {*_REASONING}:
                reply["reasoning_content"] = ""
        reply |= {"content": "\n\n".join(texts)} if texts else {}
        reply |= {"tool_calls": calls} if calls else {}
        found["messages"] += [reply] if texts or calls else []
    return found


def _asked(message: Block, identity: str) -> list[Block]:
    """Convert a user message: first the texts of each result, then files of results and the other blocks."""
    results, rest = blocks.results_of(message)
    answers, files = [], []
    for result in results:
        parts = [_part(part, identity) for part in blocks.result_parts(result)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        call = result["tool_use_id"]
        if len(texts) < len(parts):
            texts.append("(Its files follow.)")
            files.append({"type": "text", "text": f"The files in the result of call {call}:"})
            files += [part for part in parts if part["type"] != "text"]
        answers.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
    said = [*files, *(_part(block, identity) for block in rest)]
    is_text = all(part["type"] == "text" for part in said)  # every server accepts a plain text
    whole: Any = "\n\n".join(part["text"] for part in said) if is_text else said
    return [*answers, {"role": "user", "content": whole}] if said else answers


def _part(block: Block, identity: str) -> Block:
    kind, content, name = blocks.part(block, identity)
    if kind == "text":
        return {"type": "text", "text": content}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": content}}
    if not content.startswith("data:"):
        raise blocks.foreign(block)
    return {"type": "file", "file": {"filename": name, "file_data": content}}


class Collected:
    """A reply that is built from the chunks of its stream; `tools` are the tools of the request."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self.raw: dict[str, Any] = {"choices": []}
        self._choice: dict[str, Any] = {"message": {}}
        self._tools, self._names = tools, {tool["name"] for tool in tools}
        self._is_sure, self._in_doubt = True, False  # sure of the arguments; in doubt which calls there are

    def add(self, chunk: dict[str, Any]) -> str:
        """Add a chunk; return the piece of text in it, or ""."""
        self.raw |= {name: chunk[name] for name in ("model", "usage") if chunk.get(name)}
        text = ""
        for choice in chunk.get("choices") or []:
            self.raw["choices"] = [self._choice]
            delta = dict(choice.get("delta") or {})
            for piece in delta.pop("tool_calls", None) or []:
                self._join(piece)
            _merge(self._choice["message"], delta)
            self._choice["finish_reason"] = choice.get("finish_reason") or self._choice.get("finish_reason")
            said = delta.get("content")
            text += said if isinstance(said, str) else ""
        return text

    def _join(self, piece: Block) -> None:
        """Add a piece to the call that it continues, or begin another call with the piece."""
        calls = self._choice["message"].setdefault("tool_calls", [])
        said = dict(piece.get("function") or {})
        name, text = said.pop("name", None), said.pop("arguments", None)
        text = text if blocks.is_nothing(text) or isinstance(text, str) else json.dumps(text)
        found = _fitting(calls, piece)
        call = found[-1] if found else None
        if call is not None and _begins_another(call, piece, name, text):
            self._is_sure &= blocks.whole_object(call["function"]["arguments"]) is not None
            self._in_doubt |= self._may_be_one(call, name, text)
            call = None
        elif call is not None and text:
            self._is_sure &= len(found) == 1 and _shares(call, piece, "index", "id")
        if call is None:
            if not (name or text or piece.get("id")):
                return
            call = {"function": {"name": "", "arguments": None}}
            calls.append(call)
        known = call["function"]
        _merge(call, {**piece, "function": said})
        if name and name != known["name"]:  # a name in pieces; half of it may be another tool's name
            if known["name"]:
                self._is_sure &= (is_same := _shares(call, piece, "id"))
                self._in_doubt |= bool({known["name"], name} & self._names) or not (self._names or is_same)
            known["name"] += name
        if blocks.is_nothing(known["arguments"]):
            known["arguments"] = text
        elif text:
            known["arguments"] += text

    def _may_be_one(self, call: Block, name: str, text: Any) -> bool:
        """Check whether two calls may be one call that began with half its name or part of its arguments."""
        known = call["function"]
        if name != known["name"]:
            return any(each.startswith(known["name"] + name) for each in self._names)
        old, new = blocks.whole_object(known["arguments"]) or {}, blocks.whole_object(text) or {}
        return bool(call.get("id")) or {**new, **old} == new or {**old, **new} == old

    def whole(self) -> dict[str, Any]:
        """Build the completion in the form without streaming; raises ProviderError for unclear calls."""
        calls = self._choice["message"].get("tool_calls") or []
        if self._choice.get("finish_reason") in _COMPLETE:  # no call of another reply runs
            ids = [call["id"] for call in calls if call.get("id")]
            indexes = {call["index"] for call in calls if call.get("index") is not None}
            said = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            is_told = len(ids) == len({*ids}) and len(calls) in (len(ids), len(indexes))
            is_sure = len(calls) == 1 or (self._is_sure and is_told)
            blocks.check_pieces(said + [("", "")] * self._in_doubt, self._tools, sure=is_sure)
        return self.raw


def _fitting(calls: list[Block], piece: Block) -> list[Block]:
    """Find the calls that a piece may continue: by index, else by id, else by position. The last is best."""
    index, call_id = piece.get("index"), piece.get("id")
    free = [call for call in calls if not call_id or call.get("id") in (None, "", call_id)]
    if found := [call for call in free if _shares(call, piece, "index")]:
        return found
    free = [call for call in free if index is None or call.get("index") is None]
    by_id = [call for call in free if _shares(call, piece, "id")]
    return by_id or (calls if free[-1:] == calls[-1:] else [])


def _shares(call: Block, piece: Block, *labels: str) -> bool:
    return any(piece.get(each) not in (None, "") and call.get(each) == piece[each] for each in labels)


def _begins_another(call: Block, piece: Block, name: Any, text: Any) -> bool:
    """Check whether a piece with a tool's name begins another call; otherwise the piece continues `call`."""
    known = call["function"]
    if not (name and known["name"]) or (_shares(call, piece, "index") and _shares(call, piece, "id")):
        return False
    if name != known["name"] and not _shares(call, piece, "index", "id"):
        return True
    is_new = name != known["name"] or (blocks.whole_object(text) is not None and text != known["arguments"])
    return is_new and blocks.whole_object(known["arguments"]) is not None


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        known = old.get(name)
        if isinstance(value, list) and (isinstance(known, list) or not known):
            known = old[name] = known or []  # one chunk may hold two pieces of one part
            for each in value:
                same = next((one for one in reversed(known) if _is_same(one, each)), None)
                if same is None:
                    known.append(each)
                else:
                    _merge(same, each)
        elif isinstance(value, dict) and isinstance(known, dict):
            _merge(known, value)
        elif isinstance(value, str) and isinstance(known, str) and name in _GROWING:
            old[name] = known + value
        elif value not in (None, "") or name not in old:
            old[name] = value


def _is_same(one: Any, other: Any) -> bool:
    """Check whether two items of a list are pieces of one item: same index, and no two different ids."""
    if not isinstance(one, dict) or not isinstance(other, dict) or "index" not in other:
        return False
    ids = {each["id"] for each in (one, other) if each.get("id")}
    return one.get("index") == other["index"] and len(ids) < 2


def reply(raw: dict[str, Any], identity: str) -> ModelReply:
    """Convert a completion to a reply; raises ProviderError for an error or an unusable reply."""
    choice = next(iter(raw.get("choices") or []), None)
    if choice is None or choice.get("finish_reason") == "error":
        raise answered(raw.get("error") or (choice or {}).get("error") or {"message": "It holds no reply."})
    message, stop = choice.get("message") or {}, choice.get("finish_reason")
    thoughts = {name: message[name] for name in _REASONING if message.get(name)}
    content: list[Block] = []
    if thoughts:
        content.append({"type": ITEM, "from": identity, "item": {"type": "reasoning", **thoughts}})
    texts = [message.get("content"), message.get("refusal")]
    content += [{"type": "text", "text": text} for text in texts if text]
    calls = message.get("tool_calls") or []
    for call in calls:
        if extras := {name: each for name, each in call.items() if name not in _CALL and each is not None}:
            item = {"type": EXTRAS, "id": call.get("id"), "extras": extras}
            content.append({"type": ITEM, "from": identity, "item": item})
    for call in calls:
        function = call.get("function") or {}
        content.append(blocks.call_block(call.get("id"), function.get("name"), function.get("arguments")))
    stop = "refusal" if message.get("refusal") else _STOPS.get(stop, stop)
    return blocks.reply(content, stop, raw, identity.partition(":")[0])
