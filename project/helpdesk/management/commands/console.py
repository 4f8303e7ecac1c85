"""`manage.py console`: run the web server and a worker until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from project.helpdesk.model import PACE
from project.helpdesk.preparation import NAME, PASSWORD, prepare

HOST = "127.0.0.1"
WORD = "0.3"  # seconds
PATIENCE = 60  # seconds for a child that was asked to stop


class Command(BaseCommand):
    help = f"Serve admin and API on {HOST}, with a worker that drives the runs."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="The port to serve on (8000).")

    def handle(self, *args: Any, port: int, **options: Any) -> None:
        require_free(port)
        prepare()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            children["The worker"] = start("resume_runs", "--watch", silent=False)
            children["The web server"] = start("runserver", f"{HOST}:{port}", "--noreload", silent=True)
            self._greet(port)
            ended = first_to_end(children)
        except KeyboardInterrupt:
            self.stdout.write("\nStopping ...")
            return
        finally:
            stop(list(children.values()))
        raise CommandError(f"{ended} ended by itself; its output is above. The other one is stopped too.")

    def _greet(self, port: int) -> None:
        self.stdout.write(
            f"Admin    http://{HOST}:{port}/admin/   user {NAME}, password {PASSWORD}\n"
            f"API      http://{HOST}:{port}/api/docs\n"
            "Ctrl-C stops both the web server and the worker."
        )
        self.stdout.flush()


def require_free(port: int) -> None:
    """Raise CommandError if the port cannot be used, as if something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise CommandError(
                f"Port {port} cannot be used ({error}). Stop what is there, or: manage.py console --port 8001"
            ) from error


def start(*command: str, silent: bool) -> subprocess.Popen[bytes]:
    """Start a command of manage.py in a session of its own, so that Ctrl-C reaches it only through `stop`."""
    return subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, str(settings.BASE_DIR / "manage.py"), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if silent else None,
        env={PACE: WORD, **os.environ},
        start_new_session=True,
    )


def first_to_end(children: dict[str, subprocess.Popen[bytes]]) -> str:
    """Wait until one of the children ends; return the child's name."""
    while True:
        for name, child in children.items():
            if child.poll() is not None:
                return name
        time.sleep(0.2)


def stop(children: list[subprocess.Popen[bytes]]) -> None:
    """Ask the children to stop, wait for them, and kill each child that does not stop within PATIENCE."""
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt
