"""A Celery worker in a process forked from a server that has imported already what it needs."""

from __future__ import annotations

import os

import django

QUIET = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=CRITICAL"]

django.setup()


def work() -> None:
    """Be a worker with a pool of one, in a session of its own, until killed."""
    from tests.celery_app import app

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    app.worker_main(["worker", "--concurrency=1", *QUIET])
