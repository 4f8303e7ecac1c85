"""Test cases of a project that uses Django's own runner; each leaves a journal behind."""

from __future__ import annotations

from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import TestCase, TransactionTestCase

from agentruns import run_agent, start_run
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, triggers
from agentruns.services.sweep import sweep
from agentruns.testing.database import JournalFlushMixin
from tests.shop.models import Order


class InATransaction(TestCase):
    def test_first(self) -> None:
        self.assertEqual(Message.objects.count(), 0)
        self.assertEqual(run_agent("calls-annotate", "do it", "s1").status, "completed")

    def test_second(self) -> None:
        self.test_first()


class Flush(JournalFlushMixin, TransactionTestCase):
    serialized_rollback = True  # Django restores onto an empty database only, so here as well

    def test_it_is_refused_while_there_is_a_journal_and_says_why(self) -> None:
        call_command("flush", interactive=False, verbosity=0)
        run = start_run("calls-post", "do it", "s1")
        before = list(Message.objects.values())
        with self.assertRaises(CommandError) as refused:
            call_command("flush", interactive=False, verbosity=0)
        self.assertIn("The journal is append-only", str(refused.exception.__cause__))
        self.assertEqual((list(Message.objects.values()), problems(run.session_id)), (before, []))
        with triggers.lifted(connection):
            call_command("flush", interactive=False, verbosity=0)
        self.assertEqual((Message.objects.count(), triggers.differences(connection)), (0, []))


class SerializedRollback(JournalFlushMixin, TransactionTestCase):
    serialized_rollback = True

    def test_first(self) -> None:
        self.assertEqual((Message.objects.count(), Order.objects.count()), (0, 0))
        Order.objects.create(number="A1", customer="Ada", total_cents=1)
        run = start_run("calls-charge", "do it", "s1")
        self.assertEqual(sweep().completed, 1)
        self.assertEqual(problems(run.session_id), [])

    def test_second(self) -> None:
        self.test_first()


class TwoDatabases(JournalFlushMixin, TransactionTestCase):
    databases = {"default", "other"}

    def test_first(self) -> None:
        for alias in self.databases:
            self.assertFalse(Run.objects.using(alias).exists())
            self.assertEqual(triggers.differences(connections[alias]), [])
            with self.settings(AGENTRUNS_DATABASE=alias):
                start_run("calls-post", "do it", "in-both")

    def test_second(self) -> None:
        self.test_first()
