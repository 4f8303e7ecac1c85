"""Checks of the deployment: the database, its routers, web requests, the dispatcher, Celery and the sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Info, Warning
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from agentruns import files, services
from agentruns.agents.agent import registered
from agentruns.checks.base import check
from agentruns.conf import settings
from agentruns.models import Control, Run, Session, triggers
from agentruns.utils.db import later

LONGEST_REPLY = 600  # seconds that a model's reply of usual length may take
TASKS, TASK = "agentruns.tasks", "agentruns.advance_run"
# Seconds after which a broker delivers an unacknowledged message again. Others do so after a disconnect.
VISIBILITY = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
NOT_NOTIFIED = (
    ", so workers are not notified: no model and no tool may run inside a web request. "
    "Runs wait for the next sweep."
)
OPTIONS = (
    "OPTIONS = {'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
    "'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL'}"
)
HANGING = "SHOW idle_in_transaction_session_timeout"
ENDED = (
    "ALTER ROLE ... SET idle_in_transaction_session_timeout = '10min'; and for connections that "
    "break without a word OPTIONS = {'keepalives': 1, 'tcp_user_timeout': 60_000}."
)
OF_A_TEST = "file:memorydb_"  # Django's name of an in-memory test database


@check()
def check_deployment() -> Iterator[CheckMessage]:
    """Check that the journal's database has ATOMIC_REQUESTS off, and that routers read the journal there."""
    alias = settings.DATABASE
    if alias not in connections:
        return
    if connections[alias].settings_dict.get("ATOMIC_REQUESTS"):
        yield Warning(
            "ATOMIC_REQUESTS is on for the journal's database: run() and resume_run() raise "
            "NotDurableError in a view. start(), decisions, the console and the API work.",
            hint="Use start() in views, and let a worker drive the run; or decorate the view with "
            f"transaction.non_atomic_requests(using={alias!r}). Then silence this check.",
            id="agentruns.W007",
        )
    engine = str(connections[alias].settings_dict["ENGINE"])
    is_known = hasattr(connections[alias], "set_tenant") or settings.CONNECTION_STATE is not None
    if any(word in engine for word in ("tenant", "schema")) and not is_known:
        text = f"The journal's own connection does not know the schema that {engine!r} has chosen."
        hint = "Set AGENTRUNS_CONNECTION_STATE; see docs/howto/hosts.md."
        yield Error(text, hint=hint, id="agentruns.E025")
    run = Run.from_db(alias, ["id"], [None])  # not Run(), which would query the time
    if (sent := router.db_for_read(Session, instance=run)) != alias:
        text = f"DATABASE_ROUTERS reads the journal's tables from {sent!r}, which may be behind {alias!r}."
        hint = "Put 'agentruns.models.router.JournalRouter' first in DATABASE_ROUTERS."
        yield Warning(text, hint=hint, id="agentruns.W013")


@check(deploy=True)
def check_files() -> Iterator[CheckMessage]:
    """Check that the libraries which look into pictures and PDFs are installed, if there are agents."""
    for why in files.missing() if registered() else ():
        hint = "Install agentruns[files], or silence this if no task, message or tool has files."
        yield Info(f"{why} before it is stored.", hint=hint, id="agentruns.I001")


@check()
def check_dispatcher() -> Iterator[CheckMessage]:
    """Check that AGENTRUNS_DISPATCHER can be used, and that its tasks do not run inside web requests.

    For Celery, also checks that the broker does not repeat a message while the message's run is driven.
    """
    path = settings.DISPATCHER
    try:
        dispatcher = import_string(path)()
        if not callable(getattr(dispatcher, "notify", None)):
            raise TypeError("it has no method notify(run_id)")
    except Exception as error:  # a module may raise anything while it is imported
        text = f"AGENTRUNS_DISPATCHER names {path!r}, which cannot be used: {error}"
        hint = (
            "'agentruns.engine.wakeup.SweepDispatcher'; 'agentruns.tasks.CeleryDispatcher', which needs `pip "
            "install agentruns[celery]`; or 'agentruns.contrib.django_tasks.TasksDispatcher'."
        )
        yield Error(text, hint=hint, id="agentruns.E014")
        return
    if getattr(dispatcher, "is_immediate", lambda: False)():
        text = "The backend of TASKS runs tasks at once"
        hint = "Name a backend with workers of its own in TASKS, or leave AGENTRUNS_DISPATCHER out."
        yield Warning(f"{text}{NOT_NOTIFIED}", hint=hint, id="agentruns.W009")
        return
    # Celery's own settings, whatever their names in the project. If Celery is not loaded, nothing uses it.
    celery: Any = sys.modules.get("celery")
    if celery is None or all(each.__module__ != TASKS for each in type(dispatcher).__mro__):
        return
    conf, task = celery.current_app.conf, celery.current_app.tasks.get(TASK)
    if conf.task_always_eager:
        hint = (
            "Turn it off where workers run; in tests drive runs with run_until_blocked() or "
            "`manage.py resume_runs`."
        )
        yield Warning(f"Celery's task_always_eager is on{NOT_NOTIFIED}", hint=hint, id="agentruns.W009")
    url = conf.broker_read_url or conf.broker_url or ""
    scheme = str(url[0] if isinstance(url, list | tuple) and url else url).partition(":")[0]
    given, visible = (conf.broker_transport_options or {}).get("visibility_timeout"), VISIBILITY.get(scheme)
    if visible is not None and given is not None:
        visible = float(given)
    timeouts = (tool.timeout or 0 for agent in registered() for tool in agent.tools.values())
    longest = max(LONGEST_REPLY, *timeouts)
    if task is not None and task.acks_late and visible is not None and visible < longest:
        yield Warning(
            f"{TASK} is set to acknowledge late, and the broker delivers unacknowledged messages again "
            f"after {visible:g} s; a call may take {longest:g} s. Each such delivery finds the run "
            "taken, and costs a worker's time.",
            hint=f"Leave {TASK} out of Celery's task_annotations: it acknowledges early, and the sweep "
            "finds what a dead worker leaves. Or raise broker_transport_options['visibility_timeout'].",
            id="agentruns.W008",
        )


@check(of=lambda: settings.DATABASE)
def check_sweeper(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Check that no run is held because committed rows were lost, and that workers sweep if runs wait."""
    if not {Run._meta.db_table, Control._meta.db_table} <= {*connection.introspection.table_names()}:
        return  # before the first migrate
    alias, late = connection.alias, services.sweep.LATE
    lost = Run.objects.using(alias).filter(status=Run.Status.PAUSED, blocked_reason__startswith=Run.REWOUND)
    if lost.exists():
        text = "The database has lost rows that were committed, and runs are held because of it."
        hint = "Follow docs/databases.md, 'Rows that vanish', before you resume them."
        yield Warning(text, hint=hint, id="agentruns.W018")
    state = services.sweep.sweeper(alias)
    waiting = Run.objects.using(alias).runnable().filter(updated_at__lt=later(-late))
    if state == "ok" or not waiting.exists():
        return
    seen = "No sweep was ever seen" if state == "never" else f"No sweep was seen for {late // 60} minutes"
    hint = "Keep `manage.py resume_runs --watch` running, or run `manage.py resume_runs` every minute."
    yield Warning(f"{seen}, and runs that can go on wait for one.", hint=hint, id="agentruns.W012")


@check(of=lambda: settings.DATABASE)
def check_database(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Check the journal's database: its vendor, autocommit, durability of commits, locking, and triggers."""
    if connection.vendor not in ("sqlite", "postgresql"):
        text = f"The journal cannot be stored in {connection.vendor}: use SQLite or PostgreSQL."
        hint = "Point AGENTRUNS_DATABASE at a PostgreSQL or SQLite database."
        yield Error(text, hint=hint, id="agentruns.E004")
    if not connection.settings_dict.get("AUTOCOMMIT", True):
        text = "AUTOCOMMIT is off for the journal's database, so nothing would be kept."
        yield Error(text, hint="Remove AUTOCOMMIT = False.", id="agentruns.E005")
    # Each query, its values under which an acknowledged commit may be lost, and what to set instead.
    asked: dict[str, tuple[tuple[str, ...], str]] = {}
    if connection.vendor == "sqlite":
        name, mode = str(connection.settings_dict["NAME"]), _answer(connection, "PRAGMA journal_mode")
        transactions = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode", ""))
        is_lost = connection.is_in_memory_db() and not name.startswith(OF_A_TEST)  # type: ignore[attr-defined]
        if is_lost:
            text = "The journal's database is in memory: it ends with this process, and no other can see it."
            hint = "Give the database a file: 'NAME': BASE_DIR / 'db.sqlite3'."
            yield Error(text, hint=hint, id="agentruns.E015")
        if not is_lost and transactions.upper() != "IMMEDIATE":
            text = "SQLite without IMMEDIATE transactions: writers that read first get 'database is locked'."
            yield Warning(text, hint=OPTIONS, id="agentruns.W002")
        if not is_lost and mode not in ("wal", "memory"):
            text = "SQLite without WAL: readers block the worker's commits, and commits block the readers."
            yield Warning(text, hint=OPTIONS, id="agentruns.W006")
        # With a WAL, NORMAL does not wait until the last commits are on the disk.
        fix = "PRAGMA synchronous=FULL in OPTIONS['init_command']"
        asked = {"PRAGMA synchronous": (("0", "1") if mode == "wal" else ("0",), fix)}
    elif connection.vendor == "postgresql":
        asked = {
            "SHOW fsync": (("off",), "fsync = on"),
            "SHOW synchronous_commit": (("off",), "synchronous_commit = on, or local, for this database"),
        }
    if connection.vendor == "postgresql" and _answer(connection, HANGING) == "0":
        text = "The server never ends the transaction of a process that hangs: it keeps its session locked."
        yield Warning(text, hint=ENDED, id="agentruns.W014")
    for question, (forgetful, fix) in asked.items():
        if (answer := _answer(connection, question)) in forgetful:
            name, value = question.split()[1], {"0": "off", "1": "NORMAL"}.get(answer, answer)
            text = f"{name} is {value} for the journal's database: acknowledged commits may be lost."
            yield Error(text, hint=f"Set {fix}.", id="agentruns.E006")
    # Only a warning, because `migrate` installs the triggers again.
    hint = "Find out who changed the database. `manage.py verify_journal --repair` restores our triggers."
    for text in triggers.differences(connection):
        yield Warning(text, hint=hint, id="agentruns.W017")


def _answer(connection: BaseDatabaseWrapper, question: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(question)
        return str(cursor.fetchone()[0])
