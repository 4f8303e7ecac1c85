"""The stand-in for Slack refuses what Slack refuses, and what would let a model's text act."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.fake_slack import FakeSlack
from tests.fake_slack.blocks import Refused, check_blocks
from tests.waiting import LIMIT

PLAIN = {"type": "plain_text", "text": "Approve"}
BUTTON = {"type": "button", "action_id": "a", "text": PLAIN, "value": "x"}
HEADER = {"type": "header", "text": PLAIN}


def rich(**element: Any) -> dict[str, Any]:
    part = {"type": "rich_text_section", "elements": [{"type": "text", "text": "x", **element}]}
    return {"type": "rich_text", "elements": [part]}


def actions(*buttons: Any) -> dict[str, Any]:
    return {"type": "actions", "elements": [*buttons]}


@pytest.mark.parametrize(
    "blocks",
    [
        [], [HEADER] * 51, [{"type": "section", "text": {"type": "mrkdwn", "text": "<!channel>"}}],
        [{**HEADER, "block_id": "b"}, {**HEADER, "block_id": "b"}],
        [{"type": "header", "text": {**PLAIN, "text": "x" * 151}}],
        [{"type": "header", "text": {**PLAIN, "type": "mrkdwn"}}],
        [rich(text="")], [rich(text="x" * 3001)], [rich(type="user", user_id="U1")], [rich(url="https://x.example")],
        [actions()], [actions(BUTTON, BUTTON)], [actions({**BUTTON, "value": "x" * 2001})],
        [actions({**BUTTON, "url": "x" * 3001})], [actions({**BUTTON, "style": "green"})],
        [actions({**BUTTON, "text": {**PLAIN, "text": "x" * 76}})], [actions({**BUTTON, "confirmed": True})],
    ],
)  # fmt: skip
def test_blocks_that_slack_refuses(blocks: list[Any]) -> None:
    check_blocks([HEADER, rich(), actions(BUTTON)])
    with pytest.raises(Refused):
        check_blocks(blocks)


def told(fake: FakeSlack, method: str = "chat.postMessage", token: str = "t", **body: Any) -> str:
    given = {"channel": fake.channel, "text": "hello", "blocks": [HEADER], **body}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json; charset=utf-8"}
    request = Request(fake.url + method, json.dumps(given).encode(), headers)
    answer = json.loads(urlopen(request, timeout=LIMIT).read())
    return "" if answer["ok"] else answer["error"].partition(":")[0]


def test_calls_that_slack_refuses() -> None:
    with FakeSlack("t", "s") as fake:
        assert told(fake) == ""
        assert told(fake, token="x") == "invalid_auth"
        assert told(fake, "chat.shout") == "unknown_method"
        assert told(fake, channel="C9") == "channel_not_found"
        assert told(fake, link_names=True) == "invalid_arguments"
        assert told(fake, "chat.update", ts="1") == "message_not_found"
        for text in ("<!channel>", "a & b", "", "x" * 40_001):
            assert told(fake, text=text) == "text that Slack reads as markup"
        assert len(fake.messages) == 1
