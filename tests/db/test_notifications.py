"""What others are told: signals after the commit, and an outbox that is delivered until it went through."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import math
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import django
import pytest
from django.core import mail
from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils import timezone

from agentruns import approve, cancel_run, deny, pause_run, run_agent, signals, start_run, tool
from agentruns.contrib.mail import MailNotifier
from agentruns.journal.outbox import MAX_ATTEMPTS, Notice, UndeliverableError, deliver_due, resting
from agentruns.models import Notification, Run
from agentruns.services.sweep import sweep
from agentruns.utils.ids import uuid7
from tests.crash.processes import interpret_and_die
from tests.db.doubts import wire
from tests.db.helpers import run_turns, the_run, transferring, user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements
from tests.waiting import LIMIT, pause

pytestmark = pytest.mark.django_db(transaction=True)

# Ids, hashes and times hold any four digits by chance.
AMOUNT = re.compile(r"(?<![-.0-9a-f])5000(?![-0-9a-f])")
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
MAIL = "agentruns.contrib.mail.MailNotifier"
RECORDER = f"{__name__}.Recorder"
ASK = {"tools": [call("refund", cents=5000)]}

urlpatterns: list[object] = []  # of a project that has no admin


class Recorder:
    """A notifier that remembers, and does what a test asks of it first."""

    told: ClassVar[list[Notice]] = []
    first: ClassVar[Callable[[Notice], object]] = staticmethod(lambda notice: None)

    def __call__(self, notice: Notice) -> None:
        type(self).first(notice)
        self.told.append(notice)

    @classmethod
    def types(cls) -> list[str]:
        return [notice.type for notice in cls.told]


class Endings(Recorder):
    """Wants to know of the ends only."""

    told: ClassVar[list[Notice]] = []
    events = ("run.completed", "run.failed", "run.cancelled")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    Recorder.told.clear(), Endings.told.clear()
    resting.clear()
    yield
    resting.clear()


@pytest.fixture
def recorder(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Switch the recorder on; it may be told what to do before it remembers."""
    settings.AGENTRUNS_NOTIFIERS = [RECORDER]
    return lambda action: monkeypatch.setattr(Recorder, "first", staticmethod(action))


@pytest.fixture
def listening() -> Iterator[list[tuple[str, Any]]]:
    """Listen to every signal; each heard is (event, approval or None)."""
    heard: list[tuple[str, Any]] = []

    def listen(sender: type, run_id: object, event: str, **about: Any) -> None:
        assert sender is Run
        assert not connection.in_atomic_block
        assert Run.objects.filter(pk=run_id).exists()
        heard.append((event, about.get("approval_id")))

    names = ("approval_requested", "approval_decided", "run_orphaned", "run_paused", "run_ended")
    every = [getattr(signals, name) for name in names]
    for one in every:
        one.connect(listen)
    yield heard
    for one in every:
        one.disconnect(listen)


def fail(notice: Notice) -> None:
    raise OSError("nobody answers")


def sweep_later() -> None:
    """Sweep when the pauses of all that was not sent are over."""
    Notification.objects.filter(sent_at=None).update(not_before=Now() - timedelta(seconds=1))
    sweep()


def cancelled(*sessions: str) -> None:
    """Let a run in each session end, of which there is something to tell."""
    for session in sessions:
        cancel_run(start_run(shop_agent(f"agent-{session}"), "do it", session).pk)


# --- what is told ---


def test_an_approval_and_its_run(recorder: Any, listening: Any) -> None:
    """A decision is told once enough people have approved."""
    result, card = transferring()
    approve(card.pk, user("ada", "decide_approval"))
    assert Recorder.types() == ["approval.requested"]
    approve(card.pk, user("bob", "decide_approval"))
    assert sweep().completed == 1
    expected = [("approval.requested", card.pk), ("approval.decided", card.pk), ("run.completed", None)]
    assert listening == expected
    rows = Notification.objects.order_by("pk")
    assert list(rows.values_list("event", "approval_id")) == expected
    assert not rows.filter(sent_at=None).exists()
    assert set(rows.values_list("attempts", "run_id")) == {(1, the_run(result).pk)}
    assert [(told.id, told.type, told.approval_id) for told in Recorder.told] == [
        (row.pk, row.event, row.approval_id) for row in rows
    ]
    assert [told.status for told in Recorder.told] == ["pending", "approved", "completed"]


def test_what_a_person_is_needed_for_and_each_end(recorder: Any, listening: Any) -> None:
    held = run_turns({"tools": [call("wire", text="x")]}, session="held", tools=[wire])
    assert (held.status, Recorder.types()) == ("orphaned", ["run.orphaned"])
    assert (Recorder.told[0].tool, Recorder.told[0].status) == ("wire", "orphaned")
    paused = start_run(shop_agent("paused"), "do it", "paused")
    pause_run(paused.pk)
    cancel_run(paused.pk)
    assert run_turns(ASK, session="long", max_steps=1, on_budget="fail").status == "awaiting-approval"
    deny(Run.objects.get(session__key="long").approvals.get().pk, None, "no")
    assert (sweep().failed, Recorder.types()) == (1, [event for event, _ in listening])
    assert Recorder.types()[1:] == [
        "run.paused", "run.cancelled", "approval.requested", "approval.decided", "run.failed",
    ]  # fmt: skip


def test_the_payload_is_thin_and_carries_no_arguments(settings: Any) -> None:
    """Each notifier gets the events that it names."""
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.Endings", RECORDER]
    settings.AGENTRUNS_BASE_URL = "https://shop.example/"
    result = run_turns({"tools": [call("refund", cents=987654)]})
    payload = Recorder.told[0].payload()
    card = result.pending[0]
    moment = payload.pop("timestamp")
    assert (moment[-1], datetime.fromisoformat(moment)) == ("Z", card.requested_at)
    data = {
        "run_id": result.run_id, "session": "s1", "agent": "agent-s1", "status": "pending",
        "approval_id": str(card.pk), "title": "refund", "tool": "refund", "risk": "high", "expires_at": None,
        "url": f"https://shop.example/admin/agentruns/approval/{card.pk}/change/",
    }  # fmt: skip
    assert payload == {"type": "approval.requested", "data": data}
    cancel_run(result.run_id or "")
    ended = Recorder.told[1].payload()["data"]
    assert ended["url"] == f"https://shop.example/admin/agentruns/run/{result.run_id}/change/"
    assert (ended["approval_id"], ended["title"], ended["status"]) == (None, None, "cancelled")
    assert (len(Recorder.told), Endings.types()) == (2, ["run.cancelled"])
    settings.AGENTRUNS_REDACT = f"{__name__}.hide"
    settings.ROOT_URLCONF = __name__  # without an admin there is no link

    @tool(requires_approval=True, describe=lambda args: "Pay 4111-1111 back")
    def pay() -> str:
        return "paid"

    run_turns({"tools": [call("pay")]}, tools=[pay], session="s2")
    data = Recorder.told[2].payload()["data"]
    assert (data["title"], "url" in data) == ("Pay [card] back", False)


def hide(text: str) -> str:
    """Stands for a project's AGENTRUNS_REDACT."""
    return text.replace("4111-1111", "[card]")


# --- in the transaction of what happened, or not at all ---


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_outbox_and_the_signals_roll_back_with_what_happened(recorder: Any, listening: Any) -> None:
    """No open transaction waits for the network, of whatever database."""
    run = start_run(shop_agent("undone"), "do it", "s1")
    with transaction.atomic():
        cancel_run(run.pk)
        assert Notification.objects.get().event == "run.cancelled"
        transaction.set_rollback(True)
    assert (Notification.objects.count(), listening, Recorder.told) == (0, [], [])
    with transaction.atomic():
        with transaction.atomic():
            cancel_run(run.pk)
            transaction.set_rollback(True)  # of a savepoint only
        pause_run(run.pk)
        assert (listening, Recorder.told) == ([], [])
    assert (listening, Recorder.types()) == ([("run.paused", None)], ["run.paused"])
    with transaction.atomic(using="other"):
        transaction.get_connection("other").ensure_connection()
        cancel_run(run.pk)
        assert (Notification.objects.get(sent_at=None).attempts, len(Recorder.told)) == (0, 1)
        assert listening[1:] == [("run.cancelled", None)]
    sweep()
    assert Recorder.types() == ["run.paused", "run.cancelled"]


def test_with_no_listener_and_no_notifier_nothing_is_added() -> None:
    with captured_statements() as captured:
        result = run_turns(ASK)
        pause_run(result.run_id or "")
        with transaction.atomic():
            cancel_run(result.run_id or "")
            assert connection.run_on_commit == []
    assert not [sql for sql in captured if "agentruns_notification" in sql]


def test_neither_a_listener_that_raises_nor_a_missing_notifier_harms_anything(
    listening: Any, effects: Effects, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(**about: Any) -> None:
        raise KeyError("my own mistake")

    settings.AGENTRUNS_NOTIFIERS = ["nowhere.Notifier"]
    signals.run_ended.connect(raises)
    try:
        result = run_turns({"tools": [call("post", text="x")]})
    finally:
        signals.run_ended.disconnect(raises)
    assert (result.status, effects.count(), listening) == ("completed", 1, [("run.completed", None)])
    the_run(result)
    assert "my own mistake" in caplog.text and "nowhere" in caplog.text
    settings.AGENTRUNS_NOTIFIERS = []  # a notifier that was taken away is not called any more
    sweep_later()
    row = Notification.objects.get()
    assert (row.event, row.attempts, row.sent_at) == ("run.completed", 1, None)


# --- delivered until it went through ---


def test_what_fails_is_tried_again_later_with_the_same_id(
    recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def tried(attempt: Callable[[], object], shortest: int, longest: int) -> Notification:
        began = datetime.now(UTC)
        attempt()
        row, ended = Notification.objects.get(), datetime.now(UTC)
        assert row.not_before is not None
        assert row.not_before > began + timedelta(seconds=shortest)
        assert row.not_before <= ended + timedelta(seconds=longest)
        return row

    recorder(fail)
    row = tried(lambda: cancelled("s1"), 5, 11)
    assert (row.attempts, row.sent_at, Recorder.told) == (1, None, [])
    assert "nobody answers" in caplog.text
    Notification.objects.update(not_before=Now() + timedelta(minutes=10))
    sweep()
    row.refresh_from_db()
    assert row.attempts == 1, "not before its time"
    assert tried(sweep_later, 25, 31).attempts == 2
    recorder(lambda notice: None)
    sweep_later()
    row.refresh_from_db()
    assert (row.attempts, row.sent_at is None, Recorder.told[0].id) == (3, False, row.pk)
    sweep()
    assert len(Recorder.told) == 1


@pytest.mark.parametrize(
    ("error", "times"), [(OSError("nobody answers"), MAX_ATTEMPTS), (UndeliverableError("unsubscribed"), 1)]
)
def test_after_ten_attempts_or_when_its_notifier_gives_up_it_stays(
    error: Exception, times: int, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Notice] = []

    def refuse(notice: Notice) -> None:
        calls.append(notice)
        raise error

    recorder(refuse)
    cancelled("s1")
    for _ in range(times + 2):
        sweep_later()
    row = Notification.objects.get()
    assert (len(calls), row.attempts, row.sent_at) == (times, MAX_ATTEMPTS, None)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert times == 1 or "given up" in record.getMessage()


def test_who_does_not_answer_holds_up_neither_a_run_nor_a_sweep(recorder: Any) -> None:
    calls: list[str] = []

    def refuse(notice: Notice) -> None:
        calls.append(notice.type)
        fail(notice)

    recorder(refuse)
    assert run_turns(ASK, ASK, ASK).status == "awaiting-approval"
    cancelled(*(f"n{number}" for number in range(4)))
    assert calls == ["approval.requested"], "after the first failure the rest is left to the sweep"
    sweep_later()
    assert len(calls) == 2
    recorder(lambda notice: None)
    sweep_later()
    assert Recorder.types() == ["approval.requested", *["run.cancelled"] * 4], "the oldest first"


def test_two_sweepers_at_once_deliver_once(recorder: Any) -> None:
    recorder(lambda notice: pause())
    resting[RECORDER] = math.inf  # so that all of it is left to the sweepers
    cancelled(*(f"n{number}" for number in range(10)))
    assert Recorder.told == []
    sent = at_once(*[lambda: deliver_due("default")] * 3)
    assert sum(sent) == 10
    told = Counter(notice.id for notice in Recorder.told)
    assert told == Counter(Notification.objects.values_list("pk", flat=True))
    assert set(Notification.objects.values_list("attempts", flat=True)) == {1}


@pytest.mark.parametrize(("where", "attempts"), [("signal", 0), ("notifier", 1)])
def test_a_process_killed_between_commit_and_delivery(
    where: str, attempts: int, recorder: Any, effects: Effects
) -> None:
    code = f"import django; django.setup(); from {__name__} import die_at; die_at({where!r})"
    interpret_and_die("-c", code)
    row = Notification.objects.get()
    assert (row.event, row.attempts, row.sent_at) == ("run.completed", attempts, None)
    assert (Run.objects.get().status, effects.count()) == ("completed", 1)
    sweep()
    if where == "notifier":  # it may be about to arrive: the claim has to run out first
        assert Recorder.told == []
        sweep_later()
    assert [notice.id for notice in Recorder.told] == [row.pk]


def die_at(where: str) -> None:
    """Run an agent to its end in this process, which is killed while it tells of it."""
    from django.conf import settings

    def die(*args: object, **about: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    settings.AGENTRUNS_NOTIFIERS = [RECORDER]
    if where == "signal":
        signals.run_ended.connect(die)
    else:
        Recorder.first = staticmethod(die)
    run_agent("calls-post", "do it", "s1", idempotency_key="k")


# --- webhooks, over real HTTP ---


def tell(settings: Any, port: int) -> None:
    """Have every event told to a port of this machine."""
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.webhook.WebhookNotifier"]
    settings.AGENTRUNS_WEBHOOK_URL = f"http://127.0.0.1:{port}/hooks"
    settings.AGENTRUNS_WEBHOOK_SECRET = SECRET


@pytest.fixture
def listener(settings: Any) -> Iterator[socket.socket]:
    """A server that takes a connection, once, and does nothing by itself."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        tell(settings, listener.getsockname()[1])
        yield listener


class Receiver(ThreadingHTTPServer):
    """Answers as told, then 204; keeps what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: list[int] = []
        self.came: list[tuple[dict[str, str], bytes]] = []


class _Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/hooks"
        self.server.came.append(({name.lower(): value for name, value in self.headers.items()}, body))
        status = self.server.answers.pop(0) if self.server.answers else 204
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", "/hooks?again")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setattr("agentruns.journal.outbox.REST_SECONDS", 3600)
    tell(settings, server.server_port)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_receiver_that_fails_twice_gets_it_at_the_third_attempt(receiver: Receiver) -> None:
    receiver.answers, began = [500, 503], timezone.now()
    result = run_turns(ASK)
    for _ in range(3):
        sweep_later()
    row = Notification.objects.get()
    assert (row.attempts, row.sent_at is None, len(receiver.came)) == (3, False, 3)
    for headers, body in receiver.came:
        assert headers["webhook-id"] == str(row.pk)
        moment = headers["webhook-timestamp"]
        assert int(began.timestamp()) <= int(moment) <= timezone.now().timestamp()
        signed = hmac.new(b"k" * 32, f"{row.pk}.{moment}.".encode() + body, hashlib.sha256).digest()
        assert headers["webhook-signature"] == "v1," + base64.b64encode(signed).decode()
        assert headers["content-type"] == "application/json"
        payload = json.loads(body)
        assert (payload["type"], payload["data"]["run_id"]) == ("approval.requested", result.run_id)
        assert not AMOUNT.search(body.decode())


@pytest.mark.parametrize(("answer", "attempts"), [(302, 1), (307, 1), (404, 1), (410, MAX_ATTEMPTS)])
def test_what_is_no_success(answer: int, attempts: int, receiver: Receiver) -> None:
    receiver.answers = [answer]
    cancelled("s1")
    row = Notification.objects.get()
    assert (row.attempts, row.sent_at) == (attempts, None)
    assert len(receiver.came) == 1, "a redirect is not followed"


class Drip(threading.Thread):
    """Takes one connection and sends `each` every 50 ms after `first`, for minutes or until it is closed."""

    def __init__(self, listener: socket.socket, first: bytes, each: bytes) -> None:
        super().__init__(daemon=True)
        self.listener, self.first, self.each = listener, first, each
        self.was_waited_for, self.over = False, threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            peer, _ = self.listener.accept()
            with peer:
                peer.sendall(self.first)
                for _ in range(int(LIMIT / 0.05)):
                    peer.sendall(self.each)
                    if self.over.wait(0.05):  # waits: as a slow receiver does
                        return
                self.was_waited_for = True

    def was_left(self) -> bool:
        """Wait until the connection is closed; tell whether the other end has closed it."""
        self.join(2 * LIMIT)
        return not self.is_alive() and not self.was_waited_for


OK, HEAD = b"HTTP/1.1 200 OK\r\n", b"\r\nLocation: /again\r\n\r\n"
# The seconds that a delivery has, what comes first, what drips after it, and whether that counts as sent.
DRIPS = {
    "status": (0.4, b"", b"H", False),
    "headers": (0.4, OK, b"x", False),
    "many headers": (0.4, OK, b"x: y\r\n", False),
    "not yet": (0.4, b"", b"HTTP/1.1 100 Continue\r\n\r\n", False),
    "the body is not read": (2 * LIMIT, b"HTTP/1.1 200 OK" + HEAD, b"x" * 65_536, True),
    "that of an error": (2 * LIMIT, b"HTTP/1.1 500 Oh" + HEAD, b"x" * 65_536, False),
    "that of a redirect": (2 * LIMIT, b"HTTP/1.1 302 Found" + HEAD, b"x" * 65_536, False),
}


@pytest.mark.parametrize("drip", DRIPS)
def test_a_delivery_ends_in_time_however_slowly_the_answer_drips(
    drip: str, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, first, each, is_sent = DRIPS[drip]
    monkeypatch.setattr("agentruns.contrib.webhook.TIMEOUT", seconds)
    monkeypatch.setattr("agentruns.journal.outbox.REST_SECONDS", 3600)
    dripping = Drip(listener, first, each)
    cancelled("s1")
    assert dripping.was_left(), "no thread waits for the end of the answer"
    row = Notification.objects.get()
    assert (row.attempts, row.sent_at is not None) == (1, is_sent)
    if not is_sent:  # it costs its time once
        cancelled("s2", "s3")
        assert sorted(Notification.objects.values_list("attempts", flat=True)) == [0, 0, 1]


def test_a_receiver_that_takes_no_connection(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentruns.contrib.webhook.TIMEOUT", 0.4)
    with ExitStack() as stack:
        for _ in range(3):  # fill what the system takes on its behalf
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        cancelled("s1")
    assert "[Errno" not in caplog.text, "the system itself gives up after two minutes"
    assert Notification.objects.values_list("attempts", "sent_at").get() == (1, None)


# --- e-mail ---


@pytest.fixture
def letters(settings: Any) -> list[Any]:
    """Write to two people, by Django's own mailer for tests; return what was written."""
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    settings.AGENTRUNS_NOTIFIERS = [MAIL]
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example", "ada@shop.example"]
    return mail.outbox


def test_an_e_mail_says_what_is_asked(settings: Any, letters: list[Any]) -> None:
    settings.AGENTRUNS_BASE_URL = "https://shop.example"
    result = run_agent("calls-refund", "do it", "s1", actor=user("bea"), idempotency_key="k")
    (letter,) = letters
    card = result.pending[0]
    assert letter.to == ["ops@shop.example", "ada@shop.example"]
    assert letter.subject == "[agentruns] Approval needed: refund"
    for line in ("Risk: high", "Requester: bea", "Session: s1"):
        assert f"\n{line}\n" in letter.body
    assert f"https://shop.example/admin/agentruns/approval/{card.pk}/change/" in letter.body
    assert not AMOUNT.search(letter.body)
    cancel_run(result.run_id or "")
    assert len(letters) == 1, "an end needs nobody"
    settings.AGENTRUNS_REDACT = f"{__name__}.hide"
    run_agent("calls-refund", "do it", "s-4111-1111", actor=user("4111-1111"), idempotency_key="k2")
    for line in ("Requester: [card]", "Session: s-[card]"):
        assert f"\n{line}\n" in letters[1].body
    resting[MAIL] = math.inf
    result = run_turns(ASK, session="s3")
    deny(result.pending[0].pk, None, "no")
    sweep()
    assert len(letters) == 2, "what was decided meanwhile needs nobody"
    assert not Notification.objects.filter(sent_at=None).exists()


def test_a_mail_server_that_drips_holds_no_run_for_long(
    settings: Any, listener: socket.socket, letters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentruns.contrib.mail.TIMEOUT", 1)
    dripping = Drip(listener, b"220-", b"x")
    host, port = listener.getsockname()
    smtp = "django.core.mail.backends.smtp.EmailBackend"
    if django.VERSION >= (6, 1):
        options = {"host": host, "port": port, "timeout": 2 * LIMIT}
        settings.MAILERS = {"default": {"BACKEND": smtp, "OPTIONS": options}}
    else:
        settings.EMAIL_BACKEND, settings.EMAIL_TIMEOUT = smtp, 2 * LIMIT
        settings.EMAIL_HOST, settings.EMAIL_PORT = host, port
    run_agent("calls-refund", "do it", "s1", idempotency_key="k")
    assert dripping.is_alive(), "its end was not waited for"
    dripping.over.set()
    dripping.join()
    assert Notification.objects.get().sent_at is None, "it is tried again"


HOSTILE = "Refund\r\nBcc: everybody@evil.example\n\nLink: https://evil.example\x00\u202e\u2028" + "x" * 500


def test_a_hostile_title_is_one_line_of_the_letter(settings: Any, letters: list[Any]) -> None:
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    expires = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
    notice = Notice(
        id=uuid7(), type="approval.requested", timestamp=expires, run_id=uuid7(), session="s1", agent="a",
        status="pending", requester="b\nRisk: low", approval_id=uuid7(), title=HOSTILE, tool="refund",
        risk="high", expires_at=expires, url="",
    )  # fmt: skip
    MailNotifier()(notice)
    (letter,) = letters
    headers = letter.message()
    assert headers.get_all("Bcc") is None
    assert headers["To"] == "ops@shop.example"
    assert len(letter.subject) <= 150
    assert letter.recipients() == ["ops@shop.example"]
    lines = letter.body.splitlines()
    assert not [line for line in lines if line.startswith(("Link:", "Bcc:", "Risk: low"))]
    assert "Expires: 2030-01-01 21:04 CST" in lines, "in the project's time zone"
    assert all(character.isprintable() for line in lines for character in line)
