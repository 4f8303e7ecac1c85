"""Claude models through the Anthropic SDK, imported at the first request because that takes seconds."""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

from agentruns.providers import blocks, window
from agentruns.providers.base import ModelReply, ModelRequest, ProviderError, check_reply, send_text
from agentruns.providers.failures import Answer, SDKModel, classify, of_status, plain, refuse
from agentruns.utils import json as canonical

DEFAULT_MAX_TOKENS = 8192
# The SDK refuses longer replies without streaming, unless a timeout is given.
_MAX_TOKENS_IN_TEN_MINUTES = 21_333
_PLACE = re.compile(r"\bmessages\.(\d{1,6})\.content\.(\d{1,6})\b")  # in an error's text
_SECONDS_PER_TOKEN = 3600 / 128_000
_RESERVED = frozenset({"model", "system", "messages", "stream", "timeout"})
_NAMED = ("messages", "max_tokens", "betas")  # parameters of the SDK's methods
# The token counter refuses every other parameter; none of those is part of the conversation.
_COUNTED = frozenset({"system", "tools", "tool_choice", "thinking", "output_config", "speed"})
_COUNTED_WITH_BETAS = _COUNTED | {"mcp_servers", "context_management", "compaction"}
# Events the SDK derives from a delta that it has added to the message.
_ADDED = frozenset({"text", "input_json", "citation", "thinking", "signature", "compaction"})
MARKABLE = ("text", "tool_result", "image", "document")  # blocks after which a cache mark may stand
GIVE_COMPACT = (
    "Give AnthropicModel a `compact` that shortens the request (agentruns.providers.window.drop_oldest), "
    "or continue in a new session."
)
COMPACT_MORE = "That is after compact(), which has to leave out more."
UNKNOWN_DELTA = (
    "The anthropic package cannot put this streamed block together: {block} ({delta}). Upgrade it, name the "
    "betas the request needs in model_params['betas'], or give AnthropicModel streaming=False."
)


class AnthropicModel(SDKModel):
    """A Claude model by name, over the Messages API.

    `client` is your own Anthropic, AnthropicBedrock or AnthropicVertex (key, proxy, base_url). Its retries
    are switched off, because the run's own back-off waits without occupying a worker. `timeout` is in
    seconds: for a whole reply, or for each read when streaming. `cache` is the time for which the provider
    keeps the repeated parts of requests: "5m", "1h" or None. `compact` is called as `compact(messages,
    tokens, limit)` when a conversation no longer fits, and returns the messages to send instead.
    `context_window` is in tokens; without it the model queries the provider.
    """

    provider = package = "anthropic"

    def __init__(
        self,
        name: str,
        client: Any = None,
        *,
        timeout: float | None = None,
        streaming: bool = True,
        cache: Literal["5m", "1h"] | None = "5m",
        compact: window.Compact | None = None,
        context_window: int | None = None,
    ) -> None:
        super().__init__(name, client, timeout, streaming)
        if cache not in ("5m", "1h", None):
            raise ValueError(f"cache must be '5m', '1h' or None, not {cache!r}.")
        self.cache = cache
        self.compact = compact
        self.context_window = context_window

    @property
    def identity(self) -> str:
        """The model's name. Leaves out the client, so that an agent's definition does not depend on it."""
        return self.name

    def usage_in(self, raw: Any) -> dict[str, Any]:
        """Read the usage from the part of an answer that has arrived."""
        return {} if raw is None else plain(raw).get("usage") or {}

    def place_in(self, request: ModelRequest, text: str) -> tuple[int, int] | None:
        """Find the place in the request, unless the messages were sent in another form."""
        sent = blocks.for_claude(request.messages, request.params.get("thinking"))[0]
        named = _PLACE.search(text)
        sizes = ([len(blocks.blocks_of(message)) for message in each] for each in (sent, request.messages))
        is_same = self.compact is None and len({*map(tuple, sizes)}) == 1
        return (int(named[1]), int(named[2])) if named and is_same else None

    def ask(self, request: ModelRequest, answer: Answer) -> ModelReply:
        """Send the request, shortened if necessary, and read the reply; also raises errors of the SDK."""
        body = self._fitting(_body(request))
        body = canonical.legal(marked(body, self.cache) if self.cache else body)
        messages = self._messages(body)
        seconds, most = self.timeout, body["max_tokens"]
        if seconds is None and not self.streaming and most > _MAX_TOKENS_IN_TEN_MINUTES:
            seconds = most * _SECONDS_PER_TOKEN
        arguments = self.arguments(body, *_NAMED, seconds=seconds)
        if not self.streaming:
            message = messages.create(**arguments)
            return _reply(message, getattr(message, "_request_id", None))
        with messages.stream(**arguments) as stream:
            answer.begun, answer.request_id = True, stream.request_id or ""
            delta, inputs = None, dict[int, str]()
            for event in stream:
                if delta is not None and event.type not in _ADDED:
                    # The reply would be stored incomplete and could never be sent back.
                    block = answer.raw.content[delta.index].type
                    problem = UNKNOWN_DELTA.format(block=block, delta=delta.delta.type)
                    raise ProviderError(problem, disposition="pause", type="unknown_delta")
                delta = event if event.type == "content_block_delta" else None
                if event.type == "message_start":
                    answer.raw = stream.current_message_snapshot
                elif event.type == "content_block_start" and event.index != len(answer.raw.content) - 1:
                    raise blocks.unreadable()  # the SDK would give one block's pieces to another
                elif delta is not None and delta.delta.type == "input_json_delta":
                    inputs[event.index] = inputs.get(event.index, "") + event.delta.partial_json
                send_text(self, request, event.text if event.type == "text" else "")
            message = stream.get_final_message()
            if message.stop_reason in ("end_turn", "tool_use"):  # no call of another reply runs
                calls = []
                for index, block in enumerate(message.content):
                    if block.type == "tool_use":
                        # The text of an incomplete input, from which the SDK would make a smaller object.
                        text = inputs.get(index)
                        given = text if text and blocks.whole_object(text) is None else block.input
                        calls.append((block.name, text or given))
                        block.input = {} if blocks.is_nothing(given) else given
                blocks.check_pieces(calls, request.tools)
            return _reply(message, stream.request_id)

    def _messages(self, body: dict[str, Any]) -> Any:
        # Only the SDK's beta half knows a beta's blocks; the other half loses parts of them.
        client = self.client()
        return client.beta.messages if body.get("betas") else client.messages

    def _fitting(self, body: dict[str, Any]) -> dict[str, Any]:
        """Shorten a request that is too long by `compact`; return any other request unchanged.

        Raises ProviderError if `compact` fails, or if the provider counts that the request is still too long.
        """
        most = window.most_tokens(body)
        if most <= (self.context_window or window.SMALLEST):
            return body
        if self.context_window is None:
            import anthropic

            known = None
            try:
                known = self.client().models.retrieve(self.name).max_input_tokens
            except AttributeError:  # Bedrock and Vertex have no list of models
                pass
            except anthropic.APIStatusError as error:  # nor do many gateways
                if error.status_code == 401 or of_status(error.status_code) == "retry":
                    raise
            self.context_window = known or window.SMALLEST
        limit, counted = self.context_window, self._count(body)
        tokens = most if counted is None else counted
        if tokens > limit and self.compact is not None:
            messages: window.Messages = body["messages"]
            failure: ProviderError | None = None
            try:
                shorter = self.compact(copy.deepcopy(messages), tokens, limit)
                broken = window.broken_pairs(shorter, messages)
            except Exception as error:
                failure = classify(self.package, error)  # compact may have asked a model itself
            if failure is not None:
                failure.args = (f"compact() failed: {failure}",)
                raise failure
            if broken:
                text = f"The messages that compact() returned cannot be sent: {broken}."
                raise ProviderError(text, disposition="pause", type="compact_failed")
            body = {**body, "messages": shorter}
            counted = self._count(body)
        # An estimate alone refuses nothing: without a count, only the provider can tell.
        if counted is not None and counted > limit:
            advice = COMPACT_MORE if self.compact else GIVE_COMPACT
            text = f"The conversation takes {counted} tokens and {self.name} accepts {limit}. {advice}"
            raise ProviderError(text, disposition="fail", type="context_window_exceeded")
        return body

    def _count(self, body: dict[str, Any]) -> int | None:
        """Let the provider count a request's tokens; None if the client or the server cannot count."""
        import anthropic

        names = _COUNTED_WITH_BETAS if body.get("betas") else _COUNTED
        counted = {name: value for name, value in body.items() if name in {"messages", "betas", *names}}
        ask = getattr(self._messages(body), "count_tokens", None)
        if ask is None:
            return None
        try:
            return int(ask(**self.arguments(canonical.legal(counted), *_NAMED)).input_tokens)
        except anthropic.AnthropicError as error:
            # Bedrock refuses without asking, and some gateways have no such endpoint.
            if isinstance(error, anthropic.APIError) and not isinstance(error, anthropic.NotFoundError):
                raise
            return None

    def make_client(self) -> Any:
        """Make the SDK's client, which reads its key from the environment."""
        import anthropic

        return anthropic.Anthropic()


def _body(request: ModelRequest) -> dict[str, Any]:
    """Build the JSON of a request without the model's name; raises TypeError for unusable parameters."""
    refuse(request.params, _RESERVED)
    messages, thinking = blocks.for_claude(request.messages, request.params.get("thinking"))
    body = {"max_tokens": DEFAULT_MAX_TOKENS, **request.params, "messages": messages}
    if thinking is not None:
        body["thinking"] = thinking
    if not body.get("betas"):
        body.pop("betas", None)
    if not isinstance(body["max_tokens"], int):
        raise TypeError(f"max_tokens must be a whole number, not {body['max_tokens']!r}")
    if request.system:
        body["system"] = request.system
    tools = [*request.tools, *request.params.get("tools", [])]
    if tools:
        body["tools"] = tools
    if request.output_schema is not None:
        import anthropic

        schema = anthropic.transform_schema(request.output_schema)
        form = {"format": {"type": "json_schema", "schema": schema}}
        body["output_config"] = {**request.params.get("output_config", {}), **form}
    return body


def _reply(message: Any, request_id: str | None) -> ModelReply:
    data = plain(message)
    if not isinstance(data.get("content"), list):
        raise ProviderError("The answer is not a message.", disposition="retry", type="invalid_reply")
    usage, model = data.get("usage") or {}, str(data.get("model") or "")
    return check_reply(ModelReply(data["content"], data.get("stop_reason"), usage, model, request_id or ""))


def marked(body: dict[str, Any], ttl: str = "5m") -> dict[str, Any]:
    """Copy the request with cache marks after tools and system, and after the last two user messages.

    The provider keeps the prefix up to each mark, in the order tools, system, messages. Writing a prefix
    costs a quarter more than its tokens and reading it a tenth, so only repeated parts are marked.
    The previous request ended at the second-to-last user message, so the cache is read up to there. Returns
    `body` itself if the developer has set marks, or if no part will be repeated.
    """
    # Without tools the first reply is the last one, unless the session continues.
    is_repeated = body.get("tools") or len(body["messages"]) > 1
    # In messages too, where `compact` may have set them.
    sent = [block for message in body["messages"] for block in message["content"]]
    if not is_repeated or any("cache_control" in each for each in (body, *body.get("tools", []), *sent)):
        return body
    mark = {"cache_control": {"type": "ephemeral"} if ttl == "5m" else {"type": "ephemeral", "ttl": ttl}}
    result = dict(body)
    if body.get("system"):
        result["system"] = [{"type": "text", "text": body["system"], **mark}]
    elif body.get("tools"):
        result["tools"] = [*body["tools"][:-1], {**body["tools"][-1], **mark}]
    messages = list(body["messages"])
    users = [position for position, message in enumerate(messages) if message["role"] == "user"]
    for position in users[-2:]:
        content = [*blocks.blocks_of(messages[position])]
        if content and content[-1].get("type") in MARKABLE:
            content[-1] = {**content[-1], **mark}
        messages[position] = {**messages[position], "content": content}
    result["messages"] = messages
    return result
