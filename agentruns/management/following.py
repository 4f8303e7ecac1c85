"""The rows of a session as they are journaled, read beside the process that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from django.db import DatabaseError, InterfaceError, connections

from agentruns.journal.events import Row
from agentruns.journal.read import session_rows
from agentruns.models import Session
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.management")

PAUSE = 0.1  # seconds


class Follower:
    """Hands every row that is added to a session inside the block to `show`, each once and in order."""

    def __init__(self, alias: str, session_key: str, show: Callable[[Row], None]) -> None:
        self.alias = alias
        self.sessions = Session.objects.using(alias).filter(key=session_key)
        self.show = show
        self.seq = self.sessions.values_list("next_seq", flat=True).first() or 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agentruns-follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show_new()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(PAUSE):
                try:
                    self._show_new()
                except (DatabaseError, InterfaceError):  # whatever is missed now comes at the end
                    logger.info("Journal not readable now", exc_info=True)
                    connections[self.alias].close()
                except BrokenPipeError:  # nobody reads any more; the run goes on all the same
                    return
        finally:
            connections[self.alias].close()

    def _show_new(self) -> None:
        session_id = self.sessions.values_list("pk", flat=True).first()
        if session_id is None:
            return
        for row in session_rows(self.alias, session_id, after=self.seq - 1):
            self.seq = row.seq + 1
            self.show(row)
