"""A real pgbouncer in transaction mode, in front of the tests' PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers import listens, stop_with_parent, wait_until_ready

PORT = "6432"
# Three connections to the server, taken in turns: what a session keeps is not there at the next transaction.
CONFIG = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
pool_mode = transaction
default_pool_size = 3
min_pool_size = 3
server_round_robin = 1
"""


def binary() -> str | None:
    """Find pgbouncer, or None."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


@contextlib.contextmanager
def pgbouncer(host: str, port: str, user: str) -> Iterator[str]:
    """Run pgbouncer before the server at that place; yield the folder of its socket, at port PORT."""
    with tempfile.TemporaryDirectory(prefix="agentruns-pgbouncer-") as name:
        folder = Path(name)
        config, log = folder / "pgbouncer.ini", folder / "log"
        config.write_text(CONFIG.format(host=host, port=port, user=user, folder=folder))
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # which it refuses to run as
            nobody = pwd.getpwnam("nobody")
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(binary()), str(config)], stdout=output, stderr=output, preexec_fn=stop_with_parent,
                **identity,
            )  # fmt: skip
        try:
            path = str(folder / f".s.PGSQL.{PORT}")
            wait_until_ready(server, lambda: listens(path), "pgbouncer", log)
            yield name
        finally:
            server.send_signal(signal.SIGTERM)  # at once; SIGINT would wait for the clients
            server.wait()
