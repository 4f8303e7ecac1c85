"""Anchors: hashes of the last rows of ended runs, given to AGENTRUNS_ANCHOR and compared with the journal.

Anchors that are kept where the owner of the database cannot write show if somebody recomputed a whole chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from agentruns.conf import settings
from agentruns.journal.events import CLOSING
from agentruns.journal.outbox import EVENTS, Notice
from agentruns.journal.verify import Problem
from agentruns.models import Message, Session, Tombstone
from agentruns.utils.lanes import Lane

TIMEOUT = 5  # seconds that a worker waits for the project's function
THREADS = 8
PAGE = 200
OLDER = "If nobody deleted it, the database was restored, or a replica took over that lacked its last rows."

_lane = Lane("agentruns-anchor", THREADS)


class Anchor(NamedTuple):
    """The row that ended a run: its session, its number `seq` in the session, and its hash `head`."""

    session: UUID
    seq: int
    head: str

    @classmethod
    def of(cls, number: int, line: str) -> Anchor:
        """Parse line `number` of a file of anchors; raises ValueError."""
        try:
            parsed = json.loads(line)
            anchor = cls(UUID(parsed["session"]), parsed["seq"], parsed["head"])
            if type(anchor.seq) is not int or not 0 < anchor.seq < 2**63 or not isinstance(anchor.head, str):
                raise ValueError("wrong types")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            text = f'Line {number} is no anchor, such as {{"session": "...", "seq": 7, "head": "..."}}.'
            raise ValueError(text) from None
        return anchor


class AnchorNotifier:
    """A notifier of the outbox that gives the hash of the row that ended a run to the project's function."""

    events = tuple(EVENTS[kind][0] for kind in CLOSING)

    def __call__(self, notice: Notice) -> None:
        """Call AGENTRUNS_ANCHOR once.

        Raises TimeoutError after TIMEOUT seconds, the function's own exception, or IndexError if the row that
        ended the run is gone.
        """
        ends = Message.objects.using(settings.DATABASE).filter(run_id=notice.run_id, kind__in=CLOSING)
        anchor = Anchor(*ends.order_by("seq").values_list("session_id", "seq", "hash")[0])
        _lane(lambda: settings.anchor(*anchor), TIMEOUT)


class Compared:
    """The comparison of anchors with the journal; the counts are complete once all of `problems` is read."""

    def __init__(self, alias: str, lines: Iterable[str], session_id: UUID | None = None) -> None:
        self.anchors, self.pruned = 0, 0
        self._alias, self._only = alias, session_id
        self._lines = enumerate(lines, start=1)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each session's first wrong anchor. Raises ValueError for an invalid line."""
        wrong: set[UUID] = set()
        while page := list(islice(self._lines, PAGE)):
            anchors = [Anchor.of(number, line) for number, line in page if line.strip()]
            anchors = [anchor for anchor in anchors if self._only in (None, anchor.session)]
            self.anchors += len(anchors)
            sessions, seqs = {anchor.session for anchor in anchors}, {anchor.seq for anchor in anchors}
            rows = Message.objects.using(self._alias).filter(session_id__in=sessions, seq__in=seqs)
            hashes = {(pk, seq): head for pk, seq, head in rows.values_list("session_id", "seq", "hash")}
            kept = Session.objects.using(self._alias).only("key", "next_seq").in_bulk(sessions)
            graves = Tombstone.objects.using(self._alias).in_bulk(sessions - {*kept})
            for anchor in anchors:
                session, head = kept.get(anchor.session), hashes.get((anchor.session, anchor.seq))
                if anchor.session in graves:
                    self.pruned += 1
                elif (session is None or head != anchor.head) and anchor.session not in wrong:
                    wrong.add(anchor.session)
                    what = _difference(anchor, session, head)
                    yield Problem(session.key if session else str(anchor.session), what, seq=anchor.seq)


def _difference(anchor: Anchor, session: Session | None, head: str | None) -> str:
    """Describe how a row's hash `head`, None for a missing row, differs from its anchor."""
    if session is None:
        return f"was anchored at seq {anchor.seq} and is gone without a tombstone. {OLDER}"
    if head is not None:
        return f"seq {anchor.seq} has another hash than its anchor: the chain was written anew."
    if (end := session.next_seq - 1) < anchor.seq:
        return f"was anchored at seq {anchor.seq}, and ends at {end}: its last rows are lost. {OLDER}"
    return f"was anchored at seq {anchor.seq}, a row that is missing."


def line_of(session_id: UUID, seq: int, head: str) -> str:
    """Format an anchor as a line of the file that `verify_journal --anchors` reads."""
    return json.dumps({"session": str(session_id), "seq": seq, "head": head}) + "\n"
