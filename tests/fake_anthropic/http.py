"""The HTTP side: answers intact or spoilt by a fault; threads and connections that end with the server."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fake_anthropic.faults import Fault

_SIZES = (1, 7, 3, 11, 2, 17)  # odd on purpose: pieces end in the middle of words and of JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes to send. `length`: what content-length says, None for a chunked answer. `pause`: seconds before
    each chunk. `clean`: whether it ends as HTTP wants; else the connection is closed."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    length: int | None = None
    pause: float = 0
    clean: bool = True


DROPPED = Answer(0, clean=False)


def plain(status: int, body: Any, fault: Fault | None, headers: Mapping[str, str]) -> Answer:
    """Build an answer in one piece."""
    data = encode_json(body)
    kind, length = fault.kind if fault else "", len(data)
    if kind in ("drop", "truncate", "corrupt", "empty"):
        data = b"" if kind == "empty" else data[: length // 2] + b",,}" * (kind == "corrupt")
    length = length if kind == "drop" else len(data)
    given = {"content-type": "application/json", **headers}
    return Answer(status, given, [data], length, _pause(fault), kind != "drop")


def streamed(
    chunks: list[bytes],
    cut: int,
    fault: Fault | None,
    headers: Mapping[str, str],
    *,
    error: bytes,
    corrupt: bytes,
) -> Answer:
    """Build an answer in events; `cut`: how many come before the fault."""
    given = {"content-type": "text/event-stream; charset=utf-8", **headers}
    kind = fault.kind if fault else ""
    begun, rest = chunks[:cut], chunks[cut:]
    spoilt = {
        "drop": begun, "truncate": begun, "empty": [],
        "error": [*begun, error], "corrupt": [*begun, corrupt, *rest],
    }  # fmt: skip
    return Answer(200, given, spoilt.get(str(kind), chunks), None, _pause(fault), kind != "drop")


def _pause(fault: Fault | None) -> float:
    return fault.delay if fault and fault.kind == "slow" else 0


def encode_json(value: Any) -> bytes:
    """Write JSON in UTF-8; what UTF-8 cannot hold is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def pieces(text: str) -> Iterator[str]:
    """Yield a text as it streams."""
    sizes, start = itertools.cycle(_SIZES), 0
    while start < len(text):
        size = next(sizes)
        yield text[start : start + size]
        start += size


# (method, path, headers with names in lower case, body) -> answer
Respond = Callable[[str, str, dict[str, str], bytes], Answer]


class Server(ThreadingHTTPServer):
    """Answers with `respond` until `stop()`, which leaves nothing behind."""

    request_queue_size = 128

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.stopping = threading.Event()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        # It polls: shutdown() is noticed between two polls.
        self._accepting = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Close every connection and wait for every thread."""
        self.stopping.set()
        self.shutdown()
        self._accepting.join()
        with self._lock:
            left = list(self._open.items())
        for thread, connection in left:
            hang_up(connection)
            thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread that `stop()` knows of from the first moment."""
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        with self._lock:
            self._open[thread] = request
        thread.start()

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[threading.current_thread()]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away: in tests they are killed on purpose."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def do_POST(self) -> None:
        """Answer."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.respond(self.command, self.path, headers, body)
        if answer.status:
            self._head(answer)
            for chunk in answer.chunks:
                self.server.stopping.wait(answer.pause)
                self._write(chunk, answer)
        if not answer.clean:
            self.close_connection = True
            hang_up(self.connection)
        elif answer.length is None:
            self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST

    def _head(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.length is None:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("content-length", str(answer.length))
        self.end_headers()

    def _write(self, data: bytes, answer: Answer) -> None:
        framed = f"{len(data):x}\r\n".encode() + data + b"\r\n" if answer.length is None else data
        self.wfile.write(framed)


def hang_up(connection: socket.socket) -> None:
    """Close both directions; the descriptor itself belongs to the thread that serves it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
