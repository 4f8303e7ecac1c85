"""Retention: ended sessions are deleted with their files; tombstones keep refusing their idempotency keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.files.storage import Storage, storages
from django.db import DatabaseError, IntegrityError, InterfaceError, connections, router, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, TextField
from django.db.models.deletion import ProtectedError, RestrictedError
from django.db.models.functions import Cast

from agentruns.agents.agent import registered
from agentruns.conf import settings
from agentruns.exceptions import NotDurableError, RunStateError
from agentruns.journal import payloads
from agentruns.journal.connection import has_foreign_blocks
from agentruns.journal.copies import kin
from agentruns.journal.read import NAMING, definitions_of
from agentruns.models import Approval, Definition, IdempotencyRecord, Message, Notification, Run, Session
from agentruns.models.bookkeeping import Spending
from agentruns.models.parts import ERASED
from agentruns.models.rule import ApprovalRule, RuleDecision
from agentruns.models.statuses import UNFINISHED
from agentruns.models.tombstone import NAMED, PrunedKey, Tombstone, forgotten
from agentruns.services.runs.sessions import require_one_scope
from agentruns.utils import clock
from agentruns.utils.db import database_now, delete_rows, in_transaction
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.retention")

PAGE = 200  # sessions, or folders of files
ANSWERS = 1_000  # deleted in one transaction
LEAST_AGE = timedelta(days=1)  # a file is written before the row that names it
POINTS = '"stored":'  # in the text of a row that names a file

COUNTS = ("sessions", "runs", "rows", "approvals", "notifications", "answers")

Stop = Callable[[], bool]
Named = tuple[set[str], set[str]]  # files and definitions, to be deleted unless another session needs them


@dataclass(slots=True)
class Pruned:
    """Counts of deleted objects, reasons for refused sessions, keys of sessions that share deleted rows."""

    sessions: int = 0
    runs: int = 0
    rows: int = 0
    approvals: int = 0
    notifications: int = 0
    answers: int = 0
    definitions: int = 0
    files: int = 0
    refused: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)


def prune_ended(days: int, *, limit: int | None = None, should_stop: Stop = lambda: False) -> Pruned:
    """Delete the sessions whose runs all ended, the last more than `days` days ago, oldest first.

    Uses the database's clock. Deletes at most `limit` sessions, each in one transaction. Then deletes the
    API's idempotency records and costs by day of that age. Deletes decisions of standing rules about deleted
    runs, once no cap counts them. Last, deletes definitions and files that nothing needs. Stops early if
    `should_stop` returns True; the next call continues. Raises ValueError if `days` is below 1, and
    NotDurableError inside a transaction.
    """
    if days < 1:
        raise ValueError(f"Sessions are kept for at least 1 day, not {days}.")
    alias, pruned = settings.DATABASE, Pruned()
    files, definitions = set[str](), set[str]()  # to be deleted, unless another session needs them
    _require_no_transaction(alias)
    now = database_now(alias)
    cutoff = now - timedelta(days=days)

    def enough() -> bool:
        return should_stop() or pruned.sessions == limit

    due = _ended(alias, cutoff).order_by("updated_at", "pk").values_list("updated_at", "pk", "session_id")
    page = list(due[:PAGE])
    while page:
        for session_id in dict.fromkeys(session_id for _, _, session_id in page):
            if enough():
                break
            try:
                mine = _committed(alias, partial(_prune, alias, session_id, cutoff, (files, definitions)))
            except RunStateError as error:
                pruned.refused.append(str(error))
                continue
            for name in COUNTS:
                setattr(pruned, name, getattr(pruned, name) + getattr(mine, name))
        pruned.files += delete_files(files)
        files.clear()
        if enough():
            break
        at, pk, _ = page[-1]
        page = list(due.filter(Q(updated_at__gt=at) | Q(pk__gt=pk), updated_at__gte=at)[:PAGE])
    old = IdempotencyRecord.objects.using(alias).filter(created_at__lt=cutoff).order_by("created_at")
    pruned.answers += _delete_by_pages(old, should_stop)
    for rule in ApprovalRule.objects.using(alias):
        longest = timedelta(seconds=max((cap["seconds"] for cap in rule.caps), default=0))
        decisions = RuleDecision._default_manager.using(alias).order_by("decided_at")
        decisions = decisions.filter(rule=rule, decided_at__lt=min(cutoff, now - longest))
        is_kept = Exists(Run.objects.using(alias).filter(pk=OuterRef("run_id")))
        _delete_by_pages(decisions.filter(~is_kept), should_stop)
    days_before = Spending._default_manager.using(alias).filter(day__lt=cutoff.date())
    in_transaction(alias, partial(delete_rows, days_before))
    _delete_definitions(alias, definitions, pruned)
    pruned.files += delete_old_files(should_stop)
    return pruned


def _delete_by_pages(rows: QuerySet[Any], should_stop: Stop) -> int:
    """Delete rows, at most ANSWERS in one transaction; return their number."""
    deleted = 0
    while not should_stop() and (keys := list(rows.values_list("pk", flat=True)[:ANSWERS])):
        deleted += in_transaction(rows.db, partial(delete_rows, rows.filter(pk__in=keys)))
    return deleted


def count_ended(days: int) -> Pruned:
    """Count the sessions and runs that are due for `prune_ended` now."""
    alias = settings.DATABASE
    runs, due = Run.objects.using(alias), Pruned()
    level = _ended(alias, database_now(alias) - timedelta(days=days)).values("session_id").distinct()
    while count := level.count():  # of sessions, then of those of child runs below them
        due.sessions += count
        due.runs += runs.filter(session_id__in=level).count()
        level = runs.filter(parent__session_id__in=level).values("session_id").distinct()
    return due


def erase_session(key: str, *, scope: str | None = None, forget_key: bool = False) -> Pruned:
    """Delete the session with a key now, and the files of pruned sessions that had the key earlier.

    `forget_key` replaces the key in their tombstones by its hash. Raises RunStateError if no session has or
    had the key, if a run of the session has not ended, or if the project's own rows refer to it;
    AmbiguousSessionError if `scope` is None and several scopes have, or had, the key; NotDurableError inside
    a transaction.
    """
    alias, files, definitions = settings.DATABASE, set[str](), set[str]()
    _require_no_transaction(alias)
    if scope is None:
        scopes = set[str]()
        for rows in (Session.objects.using(alias), Tombstone.objects.using(alias)):
            scopes.update(rows.filter(key__in=[key, forgotten(key)]).values_list("scope", flat=True))
        require_one_scope(key, sorted(scopes))
        scope = scopes.pop() if scopes else ""
    tombstones = Tombstone.objects.using(alias).filter(scope=scope, key__in=[key, forgotten(key)])

    def action() -> Pruned:
        sessions = Session.objects.using(alias).filter(scope=scope, key=key)
        session_id = sessions.values_list("pk", flat=True).first()
        pruned = Pruned() if session_id is None else _prune(alias, session_id, None, (files, definitions))
        for pk, was in list(tombstones.values_list("pk", "key")) if forget_key else ():
            Tombstone.objects.using(alias).filter(pk=pk).update(key=forgotten(was))
        return pruned

    pruned = _committed(alias, action)
    if not (session_ids := list(tombstones.values_list("pk", flat=True))):
        raise RunStateError(f"There is no session {key!r}, and none was pruned.")
    if payloads.is_configured():
        storage = storages[settings.PAYLOAD_STORAGE]
        files |= {f"{folder}/{name}" for folder in session_ids for name in _listed(storage, str(folder), 1)}
    pruned.files = delete_files(files)
    _delete_definitions(alias, definitions, pruned)
    logger.info("Erased session=%s runs=%s rows=%s", session_ids, pruned.runs, pruned.rows)
    return pruned


def revived(alias: str) -> QuerySet[Session]:
    """Select the sessions that exist although they have a tombstone, which says that they were pruned.

    The database does not refuse to delete the rows of such a session.
    """
    return Session.objects.using(alias).filter(pk__in=Tombstone.objects.using(alias).values("pk"))


def _require_no_transaction(alias: str) -> None:
    if has_foreign_blocks(connections[alias]):
        raise NotDurableError(
            f"Sessions cannot be pruned inside transaction.atomic() on {alias!r}: their files would be gone "
            "even if it is rolled back. Prune outside of it."
        )


def _ended(alias: str, cutoff: datetime) -> QuerySet[Run]:
    """Select the runs of the sessions that are due for deletion."""
    # A run that has not ended hinders itself; a condition on its status would lose the index's order.
    parent = Run.objects.using(alias).filter(pk=OuterRef("parent_id"))  # with whose session it goes
    keeps = Q(status__in=UNFINISHED) | Q(updated_at__gte=cutoff) | Q(Exists(parent))
    hindrance = Run.objects.using(alias).filter(keeps, session_id=OuterRef("session_id"))
    return Run.objects.using(alias).filter(~Exists(hindrance), updated_at__lt=cutoff)


def _committed(alias: str, action: Callable[[], Pruned]) -> Pruned:
    try:
        return in_transaction(alias, action)
    except IntegrityError as error:  # rows of the project with a constraint that only the database checks
        raise RunStateError(f"The database lets nobody delete the session: {error}") from error


def family_of(alias: str, session_id: UUID) -> list[UUID]:
    """List a session and all sessions of the child runs below it, parents before children."""
    found, last = [session_id], {session_id}
    while last:
        below = Run.objects.using(alias).filter(parent__session_id__in=last)
        last = {*below.values_list("session_id", flat=True)}.difference(found)
        found += sorted(last)
    return found


def _prune(alias: str, session_id: UUID, cutoff: datetime | None, named: Named) -> Pruned:
    """Delete a session and the sessions of its child runs; see `_prune_one`.

    Deletes nothing if the session has a child run itself: that goes with the session of its parent.
    """
    runs, pruned = Run.objects.using(alias), Pruned()
    parents = runs.filter(pk__in=runs.filter(session_id=session_id).values("parent_id"))
    if cutoff is None and (parent := parents.select_related("session").first()) is not None:
        what = f"is that of a child of run {parent.pk}: it goes with session {parent.session.key!r}"
        key = Session.objects.using(alias).get(pk=session_id).key
        raise RunStateError(f"Session {key!r} {what}. Delete that one; nothing was deleted.")
    family = family_of(alias, session_id)
    for pk in family:  # locks all of them before the first is deleted
        Session.objects.using(alias).filter(pk=pk).update(next_seq=F("next_seq"))
    lasting = Q(status__in=UNFINISHED) | Q(updated_at__gte=cutoff)
    if cutoff is None or not runs.filter(lasting, session_id__in=family).exists():
        for pk in family:
            _prune_one(alias, pk, cutoff, named, pruned)
    return pruned


def _prune_one(alias: str, session_id: UUID, cutoff: datetime | None, named: Named, pruned: Pruned) -> None:
    """Delete a session in the open transaction and leave a tombstone; add to the counts of `pruned`.

    Deletes nothing if the session is gone. Without a `cutoff`, raises RunStateError for an unfinished run,
    deletes idempotency records and lists `copies`. Raises RunStateError if rows of the project refer to the
    session. Adds the files and definitions that the session's rows name to `named`.
    """
    files, definitions = named
    sessions = Session.objects.using(alias).filter(pk=session_id)
    if sessions.update(next_seq=F("next_seq")) != 1:  # locks it
        return
    session, runs = sessions.get(), Run.objects.using(alias).filter(session_id=session_id)
    run = runs.unfinished().first() if cutoff is None else None
    if run is not None:
        which = f"{run.pk} ({run.status}). Cancel it first; nothing was deleted."
        raise RunStateError(f"Session {session.key!r} has the unfinished run {which}")
    # The database lets the session's rows be deleted once it has the tombstone.
    keyed = runs.exclude(idempotency_key="").values_list("idempotency_key", "owner_id", "pk")
    keys = {key: (owner_id, run_id) for key, owner_id, run_id in keyed}
    tombstones = Tombstone.objects.using(alias)
    if not tombstones.filter(pk=session.pk).exists():  # else it was restored with the triggers lifted
        hashes = {forgotten(key): str(run_id) for key, (_, run_id) in keys.items()}
        columns = {"scope": session.scope, "key": session.key, "head": session.head}
        names = {NAMED: forgotten(session.key), **hashes}
        tombstones.bulk_create([Tombstone(session_id=session.pk, idempotency_keys=names, **columns)])
    PrunedKey.objects.using(alias).bulk_create(
        PrunedKey(tombstone_id=session.pk, owner_id=owner_id, key=forgotten(key), run_id=run_id)
        for key, (owner_id, run_id) in keys.items()
    )
    files.update(_named_in(Message.objects.using(alias).filter(session_id=session.pk)))
    definitions |= definitions_of(alias, session.pk)
    pruned.sessions += 1
    try:
        if cutoff is None:
            # Forks of these runs, and of pruned forks, begin with the same rows.
            forks = Run.objects.using(alias).filter(origin_id__in=runs.values("pk"), origin_seq__isnull=False)
            sharing = {*forks.values_list("session_id", flat=True), *kin(alias, [session.pk])} - {session.pk}
            copies = Session.objects.using(alias).filter(pk__in=sharing)
            pruned.copies += sorted(copies.values_list("key", flat=True))
            pruned.answers += delete_answers_of(alias, session, runs)
        approvals = Approval.objects.using(alias).filter(run__in=runs).values_list("pk", flat=True)
        clear_admin_log(alias, [*runs.values_list("pk", flat=True)], [*approvals])
        pruned.rows += delete_rows(Message.objects.using(alias).filter(session_id=session.pk))
        pruned.approvals += delete_rows(Approval.objects.using(alias).filter(run__session_id=session.pk))
        notifications = Notification.objects.using(alias).filter(run__session_id=session.pk)
        pruned.notifications += delete_rows(notifications)
        pruned.runs += delete_rows(runs)
        delete_rows(sessions)
    except (ProtectedError, RestrictedError) as error:
        rows = error.protected_objects if isinstance(error, ProtectedError) else error.restricted_objects
        kept_by = sorted({row._meta.label for row in rows})
        raise RunStateError(
            f"Session {session.key!r} is kept by rows of {', '.join(kept_by)}; delete these first."
        ) from error


def clear_admin_log(alias: str, runs: Collection[UUID], approvals: Collection[UUID]) -> None:
    """Replace titles and reasons in the admin's history by ERASED; the user, the object and the time stay."""
    if not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import LogEntry

    using = router.db_for_write(LogEntry)

    def clear() -> None:
        # The name of a run does not contain its task, but that of an approval may be its title.
        named = {"object_repr": ERASED, "change_message": ERASED}
        for model, ids in ((Run, runs), (Approval, approvals)):
            about = {"content_type__app_label": "agentruns", "content_type__model": model._meta.model_name}
            entries = LogEntry.objects.using(using).filter(**about, object_id__in=map(str, ids))
            entries.update(**named if model is Approval else {"change_message": ERASED})

    if using == alias:
        clear()
    else:  # another database has no part in this transaction
        transaction.on_commit(clear, using=alias)


def delete_answers_of(alias: str, session: Session, runs: QuerySet[Run]) -> int:
    """Delete the API's idempotency records about some runs of a session; return their number."""
    records = IdempotencyRecord.objects.using(alias).filter(created_at__gte=session.created_at)
    return delete_rows(records.filter(run_id__in=list(runs.values_list("pk", flat=True))))


def _delete_definitions(alias: str, hashes: set[str], pruned: Pruned) -> None:
    """Delete each definition of `hashes` that no run uses, no row names and no agent of this process has.

    A row may name a definition that no run uses any more: an earlier one of its run or of a fork's origin.
    Such a definition is kept, because it tells which values are sensitive. If another process starts a run
    with a deleted definition now, the database refuses that start, and the process tries it again. Adds the
    number of deleted definitions to `pruned`.
    """
    hashes -= {agent.definition_hash for agent in registered()}
    runs = Run.objects.using(alias).filter(definition_id=OuterRef("pk"))
    unused = Definition.objects.using(alias).filter(~Exists(runs), pk__in=hashes)
    for name in list(unused.values_list("pk", flat=True)):
        naming = Message.objects.using(alias).filter(kind__in=NAMING)
        if not naming.annotate(text=Cast("facts", TextField())).filter(text__contains=name).exists():
            pruned.definitions += in_transaction(alias, partial(delete_rows, unused.filter(pk=name)))


def delete_files(names: Collection[str]) -> int:
    """Delete each file of `names` that no journal of this project names any more; return how many existed.

    Logs an error of a database or the storage. `delete_old_files` then deletes the remaining files later.
    """
    if not names or not payloads.is_configured():
        return 0
    try:
        unnamed = _unnamed(names)
    except (DatabaseError, InterfaceError):
        logger.exception("Files are left for the next time: a database cannot be asked who needs them.")
        return 0
    storage, deleted = storages[settings.PAYLOAD_STORAGE], 0
    for name in sorted(unnamed):
        try:
            there = storage.exists(name)
            storage.delete(name)
        except Exception:  # each storage has its own
            logger.exception("File %r of storage %r was not deleted.", name, settings.PAYLOAD_STORAGE)
        else:
            deleted += there
    for folder in {_folder(name) for name in unnamed}:
        with suppress(NotImplementedError, OSError):  # no folder there, or not empty
            os.rmdir(storage.path(folder))
    return deleted


def delete_old_files(should_stop: Callable[[], bool] = lambda: False) -> int:
    """Delete the files older than a day that no journal of this project names; return how many.

    A crash between writing a file and its row leaves such a file. The files of a session with an unfinished
    run are kept, because its worker may still store the row. Ends early if `should_stop` returns True or a
    database fails.
    """
    if not payloads.is_configured():
        return 0
    storage, deleted = storages[settings.PAYLOAD_STORAGE], 0
    folders = [name for name in _listed(storage, "", 0) if payloads.FOLDER.fullmatch(name)]
    for start in range(0, len(folders), PAGE):
        if should_stop():
            break
        page = folders[start : start + PAGE]
        names = {f"{folder}/{name}" for folder in page for name in _listed(storage, folder, 1)}
        try:
            names = _unnamed(names)
            for alias in _journals():
                runs = Run.objects.using(alias).unfinished()
                runs = runs.filter(session_id__in={_folder(name) for name in names})
                busy = {*map(str, runs.values_list("session_id", flat=True))}
                names = {name for name in names if _folder(name) not in busy}
        except (DatabaseError, InterfaceError):
            logger.exception("Files are left for the next time: a database cannot be asked who needs them.")
            break
        old, limit = list[str](), clock.now(settings.DATABASE) - LEAST_AGE
        for name in names:
            with suppress(FileNotFoundError):
                if storage.get_modified_time(name) < limit:
                    old.append(name)
        deleted += delete_files(old)
    return deleted


def _listed(storage: Storage, folder: str, what: int) -> list[str]:
    """List the folders (`what` 0) or the files (1) in a folder; [] if the folder is missing."""
    try:
        return list(storage.listdir(folder)[what])
    except FileNotFoundError:
        return []


def _folder(name: str) -> str:
    return name.partition("/")[0]


def _unnamed(names: Collection[str]) -> set[str]:
    """Find the `names` that no row in any database has; imported runs share files with their source."""
    left = {name for name in names if payloads.FOLDER.fullmatch(_folder(name))}
    for alias in _journals():
        rows = Message.objects.using(alias)
        own = rows.filter(session_id__in={_folder(name) for name in left})
        # A fork names copied files in rows up to its cut; a fork of a pruned fork does as well.
        copied = rows.filter(run__origin_seq__isnull=False, seq__lte=F("run__origin_seq"))
        for some in (own, copied):
            if left:
                left.difference_update(_named_in(some))
    return left


def _named_in(rows: QuerySet[Message]) -> Iterator[str]:
    pointing = rows.annotate(text=Cast("content", TextField())).filter(text__contains=POINTS)
    for content in pointing.values_list("content", flat=True).iterator(chunk_size=500):
        yield from payloads.names_in(content)


def _journals() -> Iterator[str]:
    """Yield the aliases of databases with a journal, except PostgreSQL's replicas, which may be behind."""
    for alias in connections:
        connection = connections[alias]
        if Message._meta.db_table not in connection.introspection.table_names():
            continue
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_is_in_recovery()")
                if cursor.fetchone()[0]:
                    continue
        yield alias
