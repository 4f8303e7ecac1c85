"""What a crowd costs: `python -m benchmarks.crowd` measures very many runs and listeners.

What is compared is measured in turn, on one PostgreSQL: pages of the console and the API beside few runs and
beside very many (`benchmarks.lists`), listeners and none (`benchmarks.listeners`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from typing import NamedTuple

from benchmarks import listeners, lists
from benchmarks.processes import Child, children, database
from tests import scratch
from tests.servers import Postgres, postgres


class Size(NamedTuple):
    """How much is measured."""

    runs: int
    pages: int  # repetitions
    listeners: int
    listening: float  # seconds
    rows: int


FULL = Size(1_000_000, 7, 200, 20.0, 2)
QUICK = Size(10_000, 3, 20, 6.0, 1)


def listening(server: Postgres, size: Size) -> list[str]:
    """Return what idle listeners cost a server, and how soon all of them have a row."""
    return [*listened(server, size, ""), *listened(server, size, "pool")]


def listened(server: Postgres, size: Size, pool: str) -> list[str]:
    """Return it for a server with Django's pool of connections, or without."""
    name = f"listeners{pool}"
    url, path = database(server, name), server.folder / name
    with children() as started:
        started.append(Child("serve", url, str(path), pool))
        told = started[0].answer()
        gauge = listeners.Gauge(server, started[0].process.pid, name)
        guests = listeners.Guests(str(path), **told)
        found = asyncio.run(listeners.listened(guests, gauge, size.listeners, size.listening, size.rows))
    how = "with Django's pool" if pool else "without a pool"
    return [f"Idle listeners of one run over ASGI, {how}, during {size.listening:.0f} s", "", *found]


def main() -> None:
    """Measure everything and print it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10,000 runs, 20 listeners")
    size = QUICK if parser.parse_args().quick else FULL
    with postgres() as server:
        place = "in memory" if server.folder.is_relative_to(scratch.MEMORY) else "on a disk"
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; PostgreSQL's data {place}\n")
        print("\n".join(lists.pages(server, size.runs, size.pages)), flush=True)
        print("\n".join(listening(server, size)), flush=True)


if __name__ == "__main__":
    actions = {"show": lists.show, "serve": listeners.serve}
    with contextlib.suppress(KeyboardInterrupt):
        actions[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in actions else main()
