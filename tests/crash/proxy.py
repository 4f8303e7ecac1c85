"""A PostgreSQL proxy that loses the answer to one commit, as a network does that breaks just then; or stalls.

A commit is a COMMIT, or an append or a claim outside any transaction, which is one of its own: sent as a
simple query, or as Parse (the first time), Bind and Execute up to a Sync.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

PORT = 5432
READY = b"Z\x00\x00\x00\x05"  # ReadyForQuery, which ends each answer; one byte more says where it leaves us
IDLE, INSIDE = READY + b"I", READY + b"T"  # outside any transaction, in one
ALONE = b"WITH c AS MATERIALIZED"  # begins each statement of ours that is a transaction by itself
HOLD = 300  # seconds after which a transaction that is held open ends by itself

# How a commit can be lost: what its transaction comes to, and whether it outlives the client's connection.
COMMITTED, ROLLED_BACK = "committed", "rolled_back"
OPEN_COMMITTED, OPEN_ROLLED_BACK = "open_committed", "open_rolled_back"


def query(text: str) -> bytes:
    """Build the simple Query message of the wire protocol, version 3."""
    body = text.encode() + b"\0"
    return b"Q" + (len(body) + 4).to_bytes(4, "big") + body


class Framing:
    """Cuts a stream into messages; only the first that a client sends, the start-up, has no type byte."""

    def __init__(self, type_size: int = 0) -> None:
        self.rest, self.type_size = b"", type_size

    def messages(self, data: bytes) -> Iterator[bytes]:
        self.rest += data
        while len(self.rest) >= self.type_size + 4:
            length = int.from_bytes(self.rest[self.type_size : self.type_size + 4], "big")
            size = self.type_size + length
            if len(self.rest) < size:
                return
            message, self.rest, self.type_size = self.rest[:size], self.rest[size:], 1
            yield message


class Dialogue:
    """What a client and a server say to each other, as far as it tells commits from the rest."""

    def __init__(self) -> None:
        self.asked, self.answered = Framing(), Framing(type_size=1)
        self.is_idle = False  # as of the last answer
        self.alone: dict[bytes, bool] = {}  # prepared statement -> whether it is a transaction by itself
        self.group: list[bytes] = []  # what is held back until its Sync

    def hear(self, answer: bytes) -> None:
        """Take what the server says."""
        for message in self.answered.messages(answer):
            if message.startswith(READY):
                self.is_idle = message == IDLE

    def groups(self, data: bytes) -> Iterator[list[bytes]]:
        """Split what the client asks into groups that the server answers together."""
        for message in self.asked.messages(data):
            self.group.append(message)
            if (
                message[:1] not in b"PBDECH"
            ):  # Parse, Bind, Describe, Execute, Close, Flush: then comes a Sync
                group, self.group = self.group, []
                yield group

    def commits(self, group: list[bytes]) -> bool:
        """Tell whether a transaction is to be committed with a group."""
        found = False
        for message in group:
            kind, name = message[:1], message[5:].partition(b"\0")[0]
            if kind == b"P":
                self.alone[name] = ALONE in message
            elif kind == b"B":  # the portal's name comes first, then that of the statement
                found = found or self.alone[message[5:].split(b"\0", 2)[1]]
            elif kind == b"Q":
                found = ALONE in message
        return group == [query("COMMIT")] or (found and self.is_idle)


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
        self.flowing, self.is_stuck = threading.Event(), threading.Event()
        self.flowing.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; connections that are open stay."""
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        shutil.rmtree(self.folder)

    def lose_next_commit(self, how: str) -> None:
        """Lose the answer to the next commit that comes through.

        `cut` is set when the client is cut off, `over` when the transaction has ended. One that stays open
        waits for `release` in between.
        """
        for event in (self.cut, self.over, self.release):
            event.clear()
        self.how = how

    def stall(self) -> None:
        """Hold back what clients ask until `flowing` is set; `is_stuck` says that there is something."""
        self.is_stuck.clear()
        self.flowing.clear()

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
        dialogue = Dialogue()
        with client, self._connect() as server:
            while True:
                try:
                    if not self._pass_on(client, server, dialogue):
                        return
                except OSError:  # one of them is gone, so the other goes too
                    return

    def _pass_on(self, client: socket.socket, server: socket.socket, dialogue: Dialogue) -> bool:
        ready, _, _ = select.select([client, server], [], [])
        if server in ready:
            answer = server.recv(65536)
            dialogue.hear(answer)
            client.sendall(answer)
            return bool(answer)
        asked = client.recv(65536)
        if not self.flowing.is_set():
            self.is_stuck.set()
            self.flowing.wait(HOLD)
        for group in dialogue.groups(asked):
            if dialogue.commits(group) and self.how:
                if dialogue.is_idle:  # so that it can be held open, or undone
                    ask(server, query("BEGIN"), INSIDE)
                    ask(server, b"".join(group), INSIDE)
                self._lose(client, server)
                return False
            server.sendall(b"".join(group))
        return bool(asked)

    def _lose(self, client: socket.socket, server: socket.socket) -> None:
        how, self.how = self.how, ""
        stays_open = how in (OPEN_COMMITTED, OPEN_ROLLED_BACK)
        if stays_open:
            self._cut_off(client)
            self.release.wait(HOLD)
        ask(server, query("COMMIT" if how in (COMMITTED, OPEN_COMMITTED) else "ROLLBACK"), IDLE)
        self.over.set()
        if not stays_open:
            self._cut_off(client)

    def _cut_off(self, client: socket.socket) -> None:
        client.shutdown(socket.SHUT_RDWR)
        self.cut.set()


def ask(server: socket.socket, message: bytes, end: bytes) -> None:
    """Send a message, and wait until its answer has ended as it must."""
    server.sendall(message)
    answer = b""
    while not answer.endswith(end):
        more = server.recv(65536)
        if not more:
            raise ConnectionError("The server went away before it had answered.")
        answer += more
