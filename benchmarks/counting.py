"""What a system asks of PostgreSQL, counted between the two: a proxy that reads the protocol as it passes.

Extensions and libraries differ in what they call a statement; the wire does not. The proxy may also hold back
what passes, as a network between two hosts would.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

NAME = ".s.PGSQL.5432"
REFUSED = (
    80877103,
    80877104,
)  # requests for TLS and GSS encryption, which a socket in a folder does not need


@dataclass
class Counts:
    """What passed since the proxy began."""

    transactions: int = 0
    statements: int = 0
    round_trips: int = 0

    def since(self, before: Counts) -> Counts:
        """Return what was added."""
        return Counts(
            self.transactions - before.transactions,
            self.statements - before.statements,
            self.round_trips - before.round_trips,
        )


class Messages:
    """Cuts one direction of a connection into the types of its messages."""

    def __init__(self, *, untyped: bool) -> None:
        self.rest, self.untyped = b"", untyped

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return type and body of each message that is complete; the first of a client has no type."""
        self.rest, found, at = self.rest + data, [], 0
        while len(self.rest) - at >= 5:
            start = at if self.untyped else at + 1
            [length] = struct.unpack_from("!I", self.rest, start)
            if start + length > len(self.rest):
                break
            kind = b"" if self.untyped else self.rest[at : at + 1]
            found.append((kind, self.rest[start + 4 : start + length]))
            self.untyped, at = False, start + length
        self.rest = self.rest[at:]
        return found


class Proxy:
    """Listens in `folder` and passes everything on to the server in `server`; `counts` is read at rest.

    Each chunk is held back for `delay` seconds, however many are under way.
    """

    def __init__(self, folder: Path, server: Path, delay: float = 0.0) -> None:
        self.server, self.delay = server, delay
        self.counts, self.lock = Counts(), threading.Lock()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / NAME))
        self.listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def read(self) -> Counts:
        """Return the counts as they are now."""
        with self.lock:
            return Counts(self.counts.transactions, self.counts.statements, self.counts.round_trips)

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        asked: list[bool] = [False]  # whether the client spoke last: then an answer ends a round trip
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self.server / NAME))
            back = threading.Thread(target=self._answers, args=(server, client, asked), daemon=True)
            back.start()
            self._requests(client, server, asked)
            back.join()

    def _requests(self, client: socket.socket, server: socket.socket, asked: list[bool]) -> None:
        messages, send = Messages(untyped=True), self._sender(server)
        while data := client.recv(1 << 16):
            if len(data) == 8 and struct.unpack("!II", data)[1] in REFUSED:
                client.sendall(b"N")
                continue
            with self.lock:
                asked[0] = True
                for kind, _ in messages.feed(data):
                    self.counts.statements += kind in (b"Q", b"E")
            send(data)
        send(b"")

    def _answers(self, server: socket.socket, client: socket.socket, asked: list[bool]) -> None:
        messages, send = Messages(untyped=False), self._sender(client)
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                with self.lock:
                    for kind, body in messages.feed(data):
                        if kind == b"Z":  # ready for the next query, outside any transaction
                            self.counts.transactions += body == b"I"
                    self.counts.round_trips += asked[0]
                    asked[0] = False
                send(data)
            send(b"")

    def _sender(self, target: socket.socket) -> Callable[[bytes], None]:
        """Return what sends a chunk when it is due, and none to end."""
        due: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

        def deliver() -> None:
            data = b"any"
            with contextlib.suppress(OSError):
                while data:
                    at, data = due.get()
                    time.sleep(max(0.0, at - time.perf_counter()))
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)

        threading.Thread(target=deliver, daemon=True).start()
        return lambda data: due.put((time.perf_counter() + self.delay, data))
