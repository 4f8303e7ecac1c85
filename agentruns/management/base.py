"""What every command shares: its database, JSON, errors that become exit codes, text for a terminal."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from agentruns.exceptions import AgentRunsError
from agentruns.management.terminal import as_json, escaped
from agentruns.utils import redaction

WRONG, USAGE = 1, 2


class AgentRunsCommand(BaseCommand):
    """A command over the services: exit 0 done, 1 found something wrong, 2 usage."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", choices=list(connections), help="The journal's database, if not AGENTRUNS_DATABASE."
        )
        parser.add_argument("--json", action="store_true", help="Print JSON, one object a line.")

    def handle(self, *args: Any, **options: Any) -> None:
        with journal_in(options["database"]):
            try:
                self.act(**options)
            except AgentRunsError as error:
                raise CommandError(escaped(error), returncode=WRONG) from _cause(error)
            except BrokenPipeError:  # such as `list_runs | head`: nobody reads any more
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(WRONG)
            except CommandError:
                raise
            except Exception as error:
                if _cause(error) is not None:
                    raise
                raise CommandError(_traceback(error), returncode=WRONG) from None

    def act(self, *args: Any, **options: Any) -> None:
        """Do what the command is for."""
        raise NotImplementedError

    def say(self, text: str = "") -> None:
        """Print a line, and at once: whoever reads it may be waiting for it."""
        self.stdout.write(escaped(text, self.stdout.encoding))
        self.stdout.flush()

    def say_json(self, value: Any) -> None:
        """Print a value as one line of JSON."""
        self.stdout.write(as_json(value))
        self.stdout.flush()


def usage(text: str) -> NoReturn:
    """End the command: it was asked for something that makes no sense."""
    raise CommandError(redaction.redact(text), returncode=USAGE)


def count_of(text: str) -> int:
    """Return an option's whole number from 1."""
    count = int(text)
    if count < 1:
        raise ArgumentTypeError("give a whole number from 1")
    return count


def _cause(error: Exception) -> Exception | None:
    """Return what a traceback may show of an error: nothing of it where AGENTRUNS_REDACT is set."""
    return None if redaction.is_on() else error


def _traceback(error: Exception) -> str:
    lines = redaction.redact("".join(traceback.format_exception(error))).splitlines()
    return "\n".join(map(escaped, lines))


@contextmanager
def journal_in(alias: str | None) -> Iterator[None]:
    """Let this process work on another journal for a while; every thread of it does."""
    if alias is None:
        yield
        return
    name = "AGENTRUNS_DATABASE"
    before = getattr(settings, name, None)
    setattr(settings, name, alias)
    try:
        yield
    finally:
        if before is None:
            delattr(settings, name)
        else:
            setattr(settings, name, before)
