"""The server, what it was told, and what it sends when somebody presses a button."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import re
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from tests.fake_anthropic.http import Answer, Server, plain
from tests.fake_slack.blocks import Refused, check_blocks

_MARKUP = re.compile("[<>]|&(?!(amp|lt|gt);)")
_TOLD = {"unfurl_links", "unfurl_media"}
# method -> the arguments that it needs, and those that it may have beside them
METHODS: dict[str, tuple[set[str], set[str]]] = {
    "chat.postMessage": {"channel", "text", "blocks"}, "chat.update": {"channel", "ts", "text", "blocks"},
    "chat.postEphemeral": {"channel", "user", "text"},
}  # type: ignore[assignment]  # fmt: skip


class FakeSlack:
    """One workspace with one app. `messages` are those of its channels, as they are now, by timestamp.

    `whispers` are what one person alone was told, as (user, text). `answer`, if set, is sent instead of the
    API's own. `calls` are the methods called.
    """

    team, app, channel = "T1", "A1", "C1"

    def __init__(self, token: str, secret: str) -> None:
        self.token, self.secret = token, secret
        self.messages: dict[str, dict[str, Any]] = {}
        self.whispers: list[tuple[str, str]] = []
        self.calls: list[str] = []
        self.answer: Answer | None = None
        self._number = itertools.count(1)
        self._server: Server | None = None

    def __enter__(self) -> Self:
        self._server = Server(self._respond)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.stop()

    @property
    def url(self) -> str:
        """The base URL of the Web API."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}/api/"

    def _respond(self, verb: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        method = path.removeprefix("/api/")
        self.calls.append(method)
        if self.answer is not None:
            return self.answer
        try:
            told = {"ok": True, **self._take(verb, method, headers, json.loads(body))}
        except Refused as error:
            told = {"ok": False, "error": str(error)}
        return plain(200, told, None, {})

    def _take(self, verb: str, method: str, headers: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
        if headers.get("authorization") != f"Bearer {self.token}":
            raise Refused("invalid_auth")
        if verb != "POST" or headers.get("content-type") != "application/json; charset=utf-8":
            raise Refused("invalid_post_type")
        if method not in METHODS:
            raise Refused("unknown_method")
        required: Any = METHODS[method]
        if not required <= {*given} <= required | _TOLD:
            raise Refused(f"invalid_arguments: {sorted(given)}")
        if given["channel"] != self.channel:
            raise Refused("channel_not_found")
        text = given["text"]
        if not 0 < len(text) <= 40_000 or _MARKUP.search(text):
            raise Refused("text that Slack reads as markup")
        if method == "chat.postEphemeral":
            self.whispers.append((given["user"], text))
            return {"message_ts": "1"}
        check_blocks(given["blocks"])
        if method == "chat.update" and given["ts"] not in self.messages:
            raise Refused("message_not_found")
        ts = given.get("ts") or f"1700000000.{next(self._number):06}"
        self.messages[ts] = given
        return {"ts": ts, "channel": self.channel}

    @property
    def latest(self) -> str:
        """The timestamp of the last message."""
        return [*self.messages][-1]

    def buttons(self, ts: str = "") -> dict[str, dict[str, Any]]:
        """The buttons of a message by action; of the last message unless `ts` names another."""
        blocks = self.messages[ts or self.latest]["blocks"]
        actions = [each for block in blocks if block["type"] == "actions" for each in block["elements"]]
        return {each["action_id"]: each for each in actions}

    def shown(self, ts: str = "") -> str:
        """The text of a message's facts, as people read them."""
        (block,) = [
            each for each in self.messages[ts or self.latest]["blocks"] if each["type"] == "rich_text"
        ]
        return "\n".join("".join(text["text"] for text in part["elements"]) for part in block["elements"])

    def press(self, action: str, user: str = "U1", *, reason: str | None = None, **change: Any) -> bytes:
        """Write the body of the request that a press of the last message's button sends.

        `button` and `ts` stand for another button or message; `team` for another workspace.
        """
        ts = change.get("ts", self.latest)
        pressed = change.get("button") or self.buttons(ts)[action]
        team, here = change.get("team", self.team), {"channel_id": self.channel, "message_ts": ts}
        payload = {
            "type": "block_actions",
            "team": {"id": self.team, "domain": "shop"},
            "user": {"id": user, "username": user.lower(), "name": "x", "team_id": team},
            "api_app_id": self.app,
            "token": "deprecated",
            "container": {"type": "message", **here, "is_ephemeral": False},
            "trigger_id": "1.2.3",
            "channel": {"id": self.channel, "name": "approvals"},
            "message": {"type": "message", "ts": ts, "text": self.messages[ts]["text"]},
            "state": {"values": {"reason": {"reason": {"type": "plain_text_input", "value": reason}}}},
            "response_url": "https://hooks.slack.example/actions/1",
            "actions": [{**pressed, "block_id": "b", "action_ts": "1"}],
        }
        return urlencode({"payload": json.dumps(payload)}).encode()

    def signed(self, body: bytes, *, ago: float = 0, secret: str = "") -> dict[str, str]:
        """Sign a body as sent `ago` seconds ago; return the headers."""
        moment = str(int(time.time() - ago))  # waits: the library reads this clock
        digest = hmac.new((secret or self.secret).encode(), f"v0:{moment}:".encode() + body, hashlib.sha256)
        return {"X-Slack-Request-Timestamp": moment, "X-Slack-Signature": f"v0={digest.hexdigest()}"}
