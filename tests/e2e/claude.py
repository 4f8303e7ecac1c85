"""Stands in for the Messages API: says over HTTP what the transcripts say."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.e2e.demo_project import ROOT


class Messages(BaseHTTPRequestHandler):
    """One reply for each request, the next turn of the ticket that the conversation begins with."""

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ticket = re.search(r"Ticket (\d+)", json.dumps(request["messages"][0]))
        assert ticket is not None
        transcript = ROOT / "fixtures" / "transcripts" / f"ticket-{ticket[1]}.json"
        number = sum(message["role"] == "assistant" for message in request["messages"])
        body = json.dumps(
            reply(json.loads(transcript.read_text())["turns"][number], number, request)
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def reply(turn: dict[str, Any], number: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return a turn as the API returns a message."""
    uses = [
        {"type": "tool_use", "id": f"toolu_{number}_{position}", "name": call["name"], "input": call["input"]}
        for position, call in enumerate(turn.get("tools", []))
    ]
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "content": [*([{"type": "text", "text": turn["text"]}] if "text" in turn else []), *uses],
        "stop_reason": "tool_use" if uses else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 20},
    }


@contextmanager
def serve() -> Iterator[str]:
    """Serve on a free port; yield the base URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Messages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
