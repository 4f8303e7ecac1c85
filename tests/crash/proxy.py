"""A PostgreSQL proxy that loses the answer to one COMMIT, as a network does that breaks just then."""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

PORT = 5432
READY = b"Z\x00\x00\x00\x05I"  # ReadyForQuery, idle: the end of the answer to COMMIT or ROLLBACK
HOLD = 60  # seconds after which a transaction that is held open ends by itself

# How a COMMIT can be lost: what its transaction comes to, and whether it outlives the client's connection.
COMMITTED, ROLLED_BACK = "committed", "rolled_back"
OPEN_COMMITTED, OPEN_ROLLED_BACK = "open_committed", "open_rolled_back"


def query(text: str) -> bytes:
    """Return the simple Query message of the wire protocol, version 3."""
    body = text.encode() + b"\0"
    return b"Q" + (len(body) + 4).to_bytes(4, "big") + body


class Framing:
    """Cuts what a client sends into messages; only the first, the start-up, has no type byte."""

    def __init__(self) -> None:
        self.rest, self.type_size = b"", 0

    def messages(self, data: bytes) -> Iterator[bytes]:
        self.rest += data
        while len(self.rest) >= self.type_size + 4:
            length = int.from_bytes(self.rest[self.type_size : self.type_size + 4], "big")
            size = self.type_size + length
            if len(self.rest) < size:
                return
            message, self.rest, self.type_size = self.rest[:size], self.rest[size:], 1
            yield message


class Proxy:
    """Listens on a unix socket in a folder of its own: clients take `folder` as host, and PORT."""

    def __init__(self, host: str, port: str) -> None:
        self.upstream = (host, int(port))
        self.folder = tempfile.mkdtemp(prefix="agentruns-proxy-")  # short: a socket's path is limited
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{self.folder}/.s.PGSQL.{PORT}")
        self.listener.listen()
        self.cut, self.over, self.release = threading.Event(), threading.Event(), threading.Event()
        self.how = ""
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; connections that are open stay."""
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        shutil.rmtree(self.folder)

    def lose_next_commit(self, how: str) -> None:
        """Lose the answer to the next COMMIT that comes through.

        `cut` is set when the client is cut off, `over` when the transaction has ended. One that stays open
        waits for `release` in between.
        """
        for event in (self.cut, self.over, self.release):
            event.clear()
        self.how = how

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True).start()

    def _connect(self) -> socket.socket:
        host, port = self.upstream
        if not host.startswith("/"):
            return socket.create_connection(self.upstream)
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(Path(host) / f".s.PGSQL.{port}"))
        return server

    def _serve(self, client: socket.socket) -> None:
        framing = Framing()
        with client, self._connect() as server:
            while True:
                try:
                    if not self._pass_on(client, server, framing):
                        return
                except OSError:  # one of them is gone, so the other goes too
                    return

    def _pass_on(self, client: socket.socket, server: socket.socket, framing: Framing) -> bool:
        ready, _, _ = select.select([client, server], [], [])
        if server in ready:
            answer = server.recv(65536)
            client.sendall(answer)
            return bool(answer)
        asked = client.recv(65536)
        for message in framing.messages(asked):
            if self.how and message == query("COMMIT"):
                self._lose(client, server)
                return False
            server.sendall(message)
        return bool(asked)

    def _lose(self, client: socket.socket, server: socket.socket) -> None:
        how, self.how = self.how, ""
        stays_open = how in (OPEN_COMMITTED, OPEN_ROLLED_BACK)
        if stays_open:
            self._cut_off(client)
            self.release.wait(HOLD)
        server.sendall(query("COMMIT" if how in (COMMITTED, OPEN_COMMITTED) else "ROLLBACK"))
        answer = b""
        while not answer.endswith(READY):
            more = server.recv(65536)
            if not more:
                raise ConnectionError("The server went away before it had answered.")
            answer += more
        self.over.set()
        if not stays_open:
            self._cut_off(client)

    def _cut_off(self, client: socket.socket) -> None:
        client.shutdown(socket.SHUT_RDWR)
        self.cut.set()
