"""The poll of the database that serves all listeners (open event streams) of this process.

When a poll is due, one listener polls for all, and each listener sends the news to its own client. No
extra thread has to run, and without listeners there are no queries.
"""

from __future__ import annotations

import time
from functools import partial, reduce
from operator import or_
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.db.models import Count, IntegerField, Max, Q, Sum
from django.db.models.functions import Now
from django.utils.module_loading import import_string

from agentruns.conf import settings
from agentruns.engine.drafts import AT_WORK, watch
from agentruns.journal import events, read
from agentruns.models import ApiToken, Message, Run
from agentruns.services import api_tokens
from agentruns.utils.forks import in_child

CONNECTIONS = 8  # of all listeners, at once
FORGOTTEN = 10.0  # seconds without a listener after which a run is polled no more
RENEWED = 5.0  # seconds between two notes to workers that somebody listens to a run
WAITS_FOR: dict[str, str] = {
    Run.Status.AWAITING_APPROVAL: "approval",
    Run.Status.WAITING: "event",
    Run.Status.ORPHANED: "verdict",
    Run.Status.PAUSED: "resume",
}
LISTENERS_EVERY = 1.5  # seconds between two looks at the listeners' tokens, users and sessions
GONE = ""  # of a listener whose token, user or session ended
MOST = 200  # rows that one poll reads for all listeners; if there are more, each listener reads its own pages

turns = BoundedSemaphore(CONNECTIONS)


class Head(NamedTuple):
    """A run as of the last poll: its status, its session's last `seq`, its step and its reply's draft."""

    status: str
    seq: int
    step: int
    draft: str = ""


class Bearer(NamedTuple):
    """The credentials of a listener: the ids of a token and a user, a key of Django's sessions, or None."""

    token: UUID | None
    user: Any
    session: str | None


NOBODY = Bearer(None, None, None)


class Poller:
    """The `Head` of each run with listeners, and the new rows that the last poll read."""

    FIRST_PAUSE = 0.5
    LONGEST_PAUSE = 2.0
    WRITING_PAUSE = 0.2
    CLAIM = 5.0

    def __init__(self) -> None:
        self._lock = Lock()
        self._heads: dict[UUID, Head | None] = {}
        self._asked: dict[UUID, float] = {}
        self._renewed: dict[UUID, float] = {}
        self._news: dict[UUID, tuple[int, int, list[events.Row]]] = {}  # after a row, up to a row, the rows
        self._heard: dict[Bearer, float] = {}
        self._credentials: dict[Bearer, str] = {}
        self._due = self._claimed = self._listeners_due = 0.0
        self._pause = self.FIRST_PAUSE

    def pause(self) -> float:
        """Compute the seconds until the next poll, at least 0.1."""
        return max(0.1, self._due - time.monotonic())  # another listener may be polling just now

    def claim(self) -> bool:
        """Claim the next poll, and return True: the caller must then poll for all listeners.

        Returns False if no poll is due, or if another caller claimed it less than CLAIM seconds ago.
        """
        now = time.monotonic()
        if now < max(self._due, self._claimed):
            return False
        self._claimed = now + self.CLAIM  # the caller may disconnect before its poll
        return True

    def head(self, run_id: UUID) -> Head | None:
        """Get the run's Head as of the last poll, None if unknown or gone, and keep the run being polled."""
        self._asked[run_id] = time.monotonic()
        return self._heads.get(run_id)

    def credentials(self, bearer: Bearer) -> str | None:
        """Get the state of a bearer as of the last look, GONE or a text; None if unknown. Keep looking at it.

        The text changes with the user's password, permissions and groups, and with the permissions of any
        group. Only the next ping notices what else changes.
        """
        self._heard[bearer] = time.monotonic()
        return self._credentials.get(bearer)

    def rows_between(self, run_id: UUID, after: int, last: int) -> list[events.Row] | None:
        """Get the run's rows after `after`, at least up to `last`; None if the last poll lacks some."""
        since, until, rows = self._news.get(run_id, (0, 0, []))
        return [row for row in rows if row.seq > after] if since <= after and last <= until else None

    def join(self, run_id: UUID) -> Head | None:
        """Poll one run for a new listener; return the run's Head, or None if the run is gone."""
        with self._lock:
            self._see([run_id])
            return self.head(run_id)

    def look(self, run_id: UUID) -> None:
        """If a poll is due, poll `run_id` and the other runs with listeners, and set the time of the next."""
        with self._lock:
            self.head(run_id)
            now = time.monotonic()
            if now < self._due:
                return
            self._asked = {run_id: at for run_id, at in [*self._asked.items()] if at > now - FORGOTTEN}
            for known in (self._heads, self._renewed):
                for run_id in known.keys() - self._asked.keys():
                    del known[run_id]
            before = dict(self._heads)
            self._see(list(self._asked))
            # Read the new rows of all runs whose session has more rows than before.
            changed = {
                run_id: (old.seq, head.seq)
                for run_id, old in before.items()
                if old and (head := self._heads.get(run_id)) and head.seq > old.seq
            }
            rows: list[events.Row] = []
            if changed:
                after = reduce(or_, (Q(run_id=run_id, seq__gt=seq) for run_id, (seq, _) in changed.items()))
                news = Message.objects.using(settings.DATABASE).filter(after).order_by("seq")
                rows = read.read_rows(news[: MOST + 1])
            self._news = {
                run_id: (*both, [row for row in rows if row.run_id == run_id])
                for run_id, both in (changed.items() if len(rows) <= MOST else ())
            }
            quiet = min(self._pause * 1.5, self.LONGEST_PAUSE)
            self._pause = self.FIRST_PAUSE if self._heads != before else quiet
            if any(head and head.draft for head in self._heads.values()):
                self._pause = min(self.WRITING_PAUSE, self.FIRST_PAUSE)
            if now >= self._listeners_due:
                self._see_listeners(now)
            self._due, self._claimed = time.monotonic() + self._pause, 0.0

    def _see_listeners(self, now: float) -> None:
        """Read the state of all bearers: one query each for tokens, users, groups' permissions, sessions."""
        self._heard = {bearer: at for bearer, at in [*self._heard.items()] if at > now - FORGOTTEN}
        tokens, users, keys = ({*each} - {None} for each in zip(*self._heard or [NOBODY], strict=True))
        valid = ApiToken.objects.using(settings.DATABASE).filter(api_tokens.VALID, pk__in=tokens)
        lasting = {None, *valid.values_list("pk", flat=True)} if tokens else {None}
        store = import_string(f"{django_settings.SESSION_ENGINE}.SessionStore")
        if keys and hasattr(store, "get_model_class"):  # each ping looks at those of other stores
            kept = store.get_model_class()._base_manager.filter(session_key__in=keys, expire_date__gt=Now())
            keys = {*kept.values_list("session_key", flat=True)}
        lasting |= keys
        model, people = get_user_model(), dict[Any, str]({None: "-"})
        held = {each.name for each in model._meta.many_to_many} & {"user_permissions", "groups"}
        counts: dict[str, Any] = {f"_ar_{name}": Count(name, distinct=True) for name in sorted(held)}
        for each in model._meta.many_to_many:
            if each.name in held and isinstance(each.related_model._meta.pk, IntegerField):
                counts[f"_ar_ids_{each.name}"] = Sum(each.name, distinct=True)  # one exchanged for another
        group = model._meta.get_field("groups").related_model if "groups" in held else None
        rights: dict[str, Any] = {}
        if users and (through := getattr(getattr(group, "permissions", None), "through", None)):
            rights = through._base_manager.aggregate(Count("pk"), Max("pk"))  # a new row has a higher key
        for user in model._base_manager.filter(pk__in=users).annotate(**counts) if users else ():
            facts = [getattr(user, name, "") for name in ("password", "is_superuser", *counts)]
            people[user.pk] = str([*facts, rights]) if user.is_active else GONE
        self._credentials = {
            bearer: people.get(bearer.user, GONE) if {bearer.token, bearer.session} <= lasting else GONE
            for bearer in self._heard
        }
        self._listeners_due = now + LISTENERS_EVERY

    def _see(self, run_ids: list[UUID]) -> None:
        """Read the Head of each run, and let workers know that somebody listens to the runs at work.

        Callers read rows only after this, so that they get the last row of a run that has ended.
        """
        runs = Run.objects.using(settings.DATABASE).filter(pk__in=run_ids)
        draft = ("draft__epoch", "draft__step", "draft__text")
        heads: dict[UUID, Head | None] = dict.fromkeys(run_ids)
        for run_id, status, seq, epoch, step, *drafted in runs.values_list(
            "pk", "status", "session__next_seq", "lease_epoch", "step", *draft
        ):
            is_drafted = status == Run.Status.RUNNING and drafted[:2] == [epoch, step]
            heads[run_id] = Head(status, seq - 1, step, drafted[2] if is_drafted else "")
        self._heads.update(heads)
        now = time.monotonic()
        at_work = [run_id for run_id, head in heads.items() if head and head.status in AT_WORK]
        if due := [run_id for run_id in at_work if now - self._renewed.get(run_id, -RENEWED) >= RENEWED]:
            self._renewed.update(dict.fromkeys(due, now))
            watch(due)  # lets workers know that somebody listens


poller = Poller()
in_child(poller.__init__)  # type: ignore[misc]
in_child(partial(turns.__init__, CONNECTIONS))  # type: ignore[misc]
