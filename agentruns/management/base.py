"""The base classes of all commands, their options, exit codes, users and signals, and text for a terminal.

Text is escaped, so that no text of a model or a tool moves the cursor or reverses other text.
AGENTRUNS_REDACT redacts texts before they are shortened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from types import FrameType
from typing import Any, NoReturn, Self

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections

from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError
from agentruns.models import Approval, ApprovalRule
from agentruns.services.data.erasure import require_one_customer, runs_of_customer
from agentruns.services.rules import list_rules
from agentruns.utils import characters, json as canonical, redaction

WRONG, USAGE = 1, 2
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Argument = tuple[str, dict[str, Any]]


def argument(name: str, help: str, **options: Any) -> Argument:
    """Declare an argument or option of a command, by the parameters of `ArgumentParser.add_argument`."""
    return name, {"help": help, **options}


def flag(name: str, help: str) -> Argument:
    """Declare an option without a value, which is False unless given."""
    return argument(name, help, action="store_true")


RUN_ID = argument("run_id", "The run's id.", metavar="ID")
CUSTOMER = (  # a run's, in place of its id; together they narrow
    argument("--owner", "The runs that this user owns.", metavar="NAME"),
    argument("--scope", "The runs in this scope.", metavar="S"),
    argument("--context", "Of the runs with this context value. Repeatable.", metavar="K=V", action="append"),
)
RULE = (
    argument("name", "The rule's name, or NAME:VERSION (the active, else newest version).", metavar="NAME"),
    argument("--scope", "The rule's scope.", default="", metavar="S"),
)
RUN_OR_CUSTOMER = (argument("run_id", "The run's id.", nargs="?", metavar="ID"), *CUSTOMER)


def customer(owner: str | None, scope: str | None, context: list[str] | None) -> dict[str, Any]:
    """Build the arguments of `list_runs` from the options of CUSTOMER; {} if all are absent or empty."""
    pairs = [each.partition("=") for each in context or ()]
    if not all(key and equals for key, equals, _value in pairs):
        usage("Give --context as KEY=VALUE, such as tenant=7.")
    user = None if owner is None else user_named(owner, is_active=False)  # the account may be closed already
    given = {"owner": user, "scope": scope, "context": {key: value for key, _equals, value in pairs} or None}
    return given if any(each not in (None, "") for each in given.values()) else {}


class AgentRunsCommand(BaseCommand):
    """A command that calls a service. Exit codes: 0 done, 1 something is wrong, 2 wrong arguments.

    An AgentRunsError becomes a CommandError with exit code 1.
    """

    arguments: Sequence[Argument] = ()
    one_of: Sequence[Argument] = ()  # exactly one of these is required
    json = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", choices=list(connections), help="The journal's database, if not AGENTRUNS_DATABASE."
        )
        parser.add_argument("--json", action="store_true", help="Print JSON, one object a line.")
        if self.one_of:
            group = parser.add_mutually_exclusive_group(required=True)
            for name, options in self.one_of:
                group.add_argument(name, **options)
        for name, options in self.arguments:
            parser.add_argument(name, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        self.json, before = options["json"], settings.DATABASE
        settings.DATABASE = options["database"] or before  # in all threads of this process
        try:
            code = self.act(**options)
        except AgentRunsError as error:
            # With AGENTRUNS_REDACT, no traceback may show the error's unredacted text.
            raise CommandError(escaped(error), returncode=WRONG) from None if redaction.is_on() else error
        except BrokenPipeError:  # such as `list_runs | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(WRONG)
        except Exception as error:
            if isinstance(error, CommandError) or not redaction.is_on():
                raise
            lines = redaction.redact("".join(traceback.format_exception(error))).splitlines()
            raise CommandError("\n".join(map(escaped, lines)), returncode=WRONG) from None
        finally:
            settings.DATABASE = before
        if code:
            sys.exit(int(code))

    def act(self, *args: Any, **options: Any) -> int | None:
        """Do the command's work. Return the exit code, or True for 1; None and False count as 0."""
        raise NotImplementedError

    def each_run(
        self, run_id: str | None, act: Callable[[str], bool], options: dict[str, Any], per: str = "pk"
    ) -> bool:
        """Call `act` with a run's id, or with those of a customer's runs (of the last one for each `per`).

        Return True if a call returned False or failed. A failure is reported and stops no other call.
        """
        whose, wrong = customer(options["owner"], options["scope"], options["context"]), 0
        if (run_id is None) != bool(whose):
            usage("Give the ID of a run, or a customer by --owner, --scope and --context.")
        if run_id is not None:
            return not act(run_id)
        found = {getattr(run, per): run.pk for run in runs_of_customer(**whose)}
        for key, pk in found.items():
            self.tell(None, f"Run {pk}")
            try:
                if per == "session_id":
                    require_one_customer(key, whose["context"])
                wrong += not act(str(pk))
            except Exception as error:  # of a provider or the project, too: go on with the next run
                wrong += 1
                self.tell({"run": str(pk), "error": redaction.redact(str(error))}, f"Failed: {error}")
        self.tell({"runs": len(found), "wrong": wrong}, f"Runs: {len(found)}, of which {wrong} went wrong.")
        return wrong > 0

    def say(self, text: str = "") -> None:
        """Redact and escape a text, print it as one line, and flush it because a reader may wait for it."""
        self.stdout.write(escaped(text, self.stdout.encoding))
        self.stdout.flush()

    def say_json(self, value: Any) -> None:
        """Print a value as one line of JSON, without redacting it, and flush it at once."""
        self.stdout.write(as_json(value))
        self.stdout.flush()

    def tell(self, record: Any, *lines: str) -> None:
        """Print `lines`, redacted. With --json, print only `record`, unredacted, unless it is None."""
        if self.json and record is not None:
            self.say_json(record)
        for line in lines if not self.json else ():
            self.say(line)


def deciding(*, reason_required: bool) -> Sequence[Argument]:
    """Declare the arguments of a command that decides an approval."""
    seen = "Digest of the arguments you saw: refused if they were edited since."
    return (
        argument("approval_id", "The approval's id, not that of its call.", metavar="ID"),
        argument("--user", "The user who decides, with the permission to.", required=True, metavar="NAME"),
        argument("--reason", "Kept in the journal.", default="", required=reason_required, metavar="TEXT"),
        argument("--digest", seen, metavar="D"),
    )


class DecidingCommand(AgentRunsCommand):
    """A command that decides one approval in the name of a user, by the service in its `decide`."""

    arguments = deciding(reason_required=False)
    decide: Callable[..., Approval]

    def act(self, *, approval_id: str, user: str, reason: str, digest: str | None, **options: Any) -> None:
        actor = user_named(user)
        approval = self.decide(approval_id, actor, reason=reason, digest=digest, channel="terminal")
        facts = {"id": approval.pk, "run": approval.run_id, "status": approval.status}
        record = {**facts, "approvals": approval.approved_count, "required": approval.required}
        given = f" ({approval.approved_count} of {approval.required} approvals)"
        so_far = given if approval.required > 1 else ""
        self.tell(record, f"Approval {approval.pk} of {approval.tool_name} is {approval.status}{so_far}.")


class Stop(ExitStack):
    """A context manager that catches SIGTERM and Ctrl-C. Call it to check whether a signal has come.

    The first signal lets the command finish its current call. The second ends the process at once. Catches
    nothing if it is entered in another thread than the main thread.
    """

    asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Self:
        def ask(number: int, frame: FrameType | None) -> None:
            self.asked = True
            for each in SIGNALS:  # so that a second signal ends the process
                signal.signal(each, signal.SIG_DFL)

        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self.callback(signal.signal, each, signal.signal(each, ask))
        return super().__enter__()


def user_named(name: str, *, is_active: bool = True) -> Any:
    """Find a user by username, or end the command with exit code 2.

    Accepts an inactive user only if `is_active` is False.
    """
    users = get_user_model()
    if (user := users._default_manager.filter(**{users.USERNAME_FIELD: name}).first()) is None:
        usage(f"There is no user {escaped(name)}.")
    if is_active and not user.is_active:
        usage(f"User {escaped(name)} is not active, so nothing can be done in their name.")
    return user


def rule_named(given: str, scope: str) -> ApprovalRule:
    """Find a standing rule by NAME or NAME:VERSION, or end the command with exit code 2.

    Without a version, finds the active one, else the newest.
    """
    rules = [each for each in list_rules().filter(scope=scope) if given in (each.name, str(each))]
    rules.sort(key=lambda each: each.status != ApprovalRule.Status.ACTIVE)
    return rules[0] if rules else usage(f"There is no rule {escaped(given)} in the scope {scope!r}.")


def usage(text: str) -> NoReturn:
    """Raise CommandError with exit code 2: `text`, which is redacted, says why the arguments are wrong."""
    raise CommandError(redaction.redact(text), returncode=USAGE)


def number(kind: type[Any], is_fit: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """Build the type of an option whose value is a number of type `kind`.

    If `is_fit` returns False for the number, the command ends with the error `wanted`.
    """

    def parse(text: str) -> Any:
        if is_fit(value := kind(text)):
            return value
        raise ArgumentTypeError(wanted)

    parse.__name__ = kind.__name__  # argparse names it for a text that is no number
    return parse


COUNT = number(int, lambda count: count >= 1, "give a whole number from 1")


def escaped(text: object, encoding: str | None = None) -> str:
    """Redact `text`, and replace line breaks, tabs and hidden characters by escapes such as `\\u202e`.

    With an `encoding`, also replaces the characters that the encoding lacks.
    """
    shown = characters.escaped(redaction.redact(str(text))).replace("\n", "\\n").replace("\t", "\\t")
    return shown.encode(encoding, "backslashreplace").decode(encoding) if encoding else shown


def shortened(text: object, limit: int = 100) -> str:
    """Redact `text`, reduce its white space to single spaces, and cut it at `limit` characters."""
    line = " ".join(redaction.redact(str(text))[: limit * 4].split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Format a call for people, such as `refund(amount_cents=2490, order_number="1002")`.

    Each value is redacted, and cut at 40 characters.
    """
    texts = {key: json.dumps(redaction.redacted(each), ensure_ascii=False) for key, each in arguments.items()}
    parts = (f"{key}={shortened(text, 40)}" for key, text in texts.items())
    return f"{name}({', '.join(parts)})"


def table(rows: Iterable[Iterable[object]]) -> Iterable[str]:
    """Format rows of equal length, with the heading as the first, as lines with aligned columns."""
    texts = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for cells in texts:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def moment(value: datetime | None) -> str:
    """Format a time in UTC, to the second; "" for None."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if value else ""


def as_json(value: Any) -> str:
    """Encode `value` as one line of JSON in ASCII, with times in ISO 8601 UTC, and UUIDs as strings.

    Writes NaN and infinite numbers, which JSON lacks, as strings.
    """
    try:
        text = json.dumps(value, cls=_Encoder, allow_nan=False)
    except ValueError:  # for NaN, which JSON lacks
        text = json.dumps(canonical.legal(value), cls=_Encoder)
    return text.replace("\x7f", "\\u007f")


class _Encoder(DjangoJSONEncoder):
    def default(self, o: Any) -> Any:
        return o.astimezone(UTC).isoformat() if isinstance(o, datetime) else super().default(o)
