"""Prompt caching: marks on a request, so that its repeated parts are read from the provider's cache.

The provider keeps the prefix up to each mark, in the order tools, system, messages. Writing a prefix costs a
quarter more than its tokens and reading it a tenth, so only parts that will be sent again are marked.
"""

from __future__ import annotations

from typing import Any

from agentruns.providers.blocks import blocks_of

MARKABLE = ("text", "tool_result", "image", "document")


def marked(body: dict[str, Any], ttl: str = "5m") -> dict[str, Any]:
    """Copy the request with cache marks after tools and system, and after the last two user messages.

    The previous request ended at the second-to-last user message, so the cache is read up to there. Returns
    `body` itself if the developer has set marks, or if no part will be repeated.
    """
    # Without tools the first reply is the last one, unless the session continues.
    is_repeated = body.get("tools") or len(body["messages"]) > 1
    # In messages too, where `compact` may have set them.
    blocks = [block for message in body["messages"] for block in message["content"]]
    if not is_repeated or any("cache_control" in each for each in (body, *body.get("tools", []), *blocks)):
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
        content = [*blocks_of(messages[position])]
        if content and content[-1].get("type") in MARKABLE:
            content[-1] = {**content[-1], **mark}
        messages[position] = {**messages[position], "content": content}
    result["messages"] = messages
    return result
