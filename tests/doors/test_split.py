"""A policy that shows some runs of a session and hides others: what is read of the whole takes seeing all."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client

from agentruns import Agent, Policy, cancel_run, fork_run, run_agent, send_message, start_run, tool
from agentruns.exceptions import RunStateError
from agentruns.models import Message, Run, triggers
from agentruns.testing import ScriptedModel
from tests.api.http import Api, make_user
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "BobMiller"
GATED = {"tools": [call("refund", cents=5000)]}


class Hides(Policy):
    """Runs of the agent "hr" are there for superusers only."""

    def visible(self, user: Any, runs: Any) -> Any:
        seen = super().visible(user, runs)
        return seen if user.is_superuser else seen.exclude(agent="hr")


def chat(name: str, *turns: Any, **options: Any) -> Agent:
    model = ScriptedModel([*turns, *[{"text": "one"}] * 5])
    given = {"instructions": "Serve.", "tools": TOOLS, "starters": "anyone", **options}
    return Agent(name, model=model, **given)


def read(response: Any) -> str:
    return (b"".join(response.streaming_content) if response.streaming else response.content).decode()


@pytest.fixture
def mixed(settings: Any) -> tuple[Any, Run, Run]:
    """A session whose first run is hidden from whoever may see all others, and that reader."""
    settings.AGENTRUNS_POLICY = f"{__name__}.Hides"
    chat("hr", {"text": f"{NAME} is fired."})
    chat("chat")
    ann = make_user("ann")
    hidden = run_agent("hr", f"Fire {NAME}", "s1", actor=ann)
    seen = run_agent("chat", "hello", "s1", actor=ann)
    reader = make_user("reader", "view_run", "fork_run", "start_run", is_staff=True)
    assert Api(reader).get(f"/runs/{hidden.run_id}")[0] == 404
    return reader, *(Run.objects.get(pk=one.run_id) for one in (hidden, seen))


@pytest.mark.parametrize("path", ["/sessions", "/sessions/s1"])
def test_the_title_is_not_that_of_a_hidden_run(mixed: Any, path: str) -> None:
    reader, _hidden, _seen = mixed
    assert NAME not in str(Api(reader).get(path))
    assert NAME in str(Api(make_user("boss", is_superuser=True)).get(path)), "who may see it"
    run_agent("chat", "a title", "s2", owner=reader)
    assert "a title" in str(Api(reader).get(path.replace("s1", "s2")))


@pytest.mark.parametrize("door", ["export", "at", "replay"])
def test_the_console_reads_no_rows_of_a_hidden_run(mixed: Any, door: str) -> None:
    reader, hidden, seen = mixed
    boss, client = make_user("boss", is_superuser=True, is_staff=True), Client()
    for user, status in ((reader, 403), (boss, 200)):
        client.force_login(user)
        path = f"/admin/agentruns/run/{seen.pk}/{door}/"
        page = client.get(path) if door == "at" else client.post(path, {"who": "code"})
        text = read(page)
        assert page.status_code == status, door
        assert (NAME in text) is (user is boss and door != "replay")
        assert str(hidden.pk) not in text or user is boss


def test_a_fork_copies_no_rows_of_a_hidden_run(mixed: Any) -> None:
    reader, hidden, seen = mixed
    last = seen.messages.latest("seq").seq
    status, problem = Api(reader).post(f"/runs/{seen.pk}/fork", {"at": last, "text": "and?"})
    assert (status, problem["type"]) == (403, "urn:agentruns:permission-denied")
    assert str(hidden.pk) not in str(problem)
    boss = Api(make_user("boss", is_superuser=True))
    assert boss.post(f"/runs/{seen.pk}/fork", {"at": last, "text": "and?"})[0] == 201


def test_rows_before_the_hidden_ones_may_be_read(mixed: Any) -> None:
    reader, _hidden, _seen = mixed
    first = run_agent("chat", "good day", "s3", actor=reader)
    run_agent("hr", f"Fire {NAME}", "s3", actor=reader)
    status, fork = Api(reader).post(f"/runs/{first.run_id}/fork", {"at": 2, "text": "and?"})
    assert status == 201
    assert NAME not in str(Api(reader).get(f"/runs/{fork['id']}/messages"))
    client = Client()
    client.force_login(reader)
    assert client.get(f"/admin/agentruns/run/{first.run_id}/at/?seq=2").status_code == 200


@tool
def fails(note: str) -> str:
    """Fail, and leave a doubt."""
    raise RuntimeError(f"{note} is not there")


def test_the_page_of_a_run_lists_no_doubt_of_a_hidden_one(mixed: Any) -> None:
    reader, _hidden, _seen = mixed
    chat("hr", {"tools": [{"name": "fails", "input": {"note": NAME}}]}, tools=[fails], version="2")
    hidden = run_agent("hr", "x", "s4", actor=reader)
    seen = run_agent("chat", "hello", "s4", actor=reader)
    client = Client()
    for user, shown in ((reader, False), (make_user("boss", is_superuser=True, is_staff=True), True)):
        client.force_login(user)
        text = read(client.get(f"/admin/agentruns/run/{seen.run_id}/change/"))
        assert (str(hidden.run_id) in text) is shown


def test_a_damaged_row_of_a_hidden_run_is_not_linked(mixed: Any) -> None:
    reader, hidden, seen = mixed
    with triggers.lifted(connection):
        Message.objects.filter(run=hidden, seq=2).update(hash="0" * 64)
    client = Client()
    for user, shown in ((reader, False), (make_user("boss", is_superuser=True, is_staff=True), True)):
        client.force_login(user)
        text = read(client.post(f"/admin/agentruns/run/{seen.pk}/verify/"))
        assert (f"{hidden.pk}/rows/2/" in text) is shown


@pytest.mark.parametrize("text", ["and Eve", "another text"])
def test_the_key_of_a_message_does_not_tell_of_a_hidden_run(settings: Any, text: str) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Hides"
    chat("hr", GATED)
    chat("chat")
    ann, reader = make_user("ann"), make_user("reader", "view_run", "start_run")
    hidden = run_agent("hr", f"Fire {NAME}", "s1", actor=ann).run_id
    send_message("s1", "and Eve", owner=ann, idempotency_key="m1")
    cancel_run(hidden)
    chat("chat", GATED, version="2")
    run_agent("chat", "hello", "s1", actor=ann)
    status, answer = Api(reader).post("/sessions/s1/messages", {"content": text, "idempotency_key": "m1"})
    assert (status, "you may not see" in str(answer)) == (404 if text == "and Eve" else 409, True)
    assert str(hidden) not in str(answer)
    assert NAME not in str(answer)


@pytest.mark.parametrize("door", ["messages", "runs", "fork"])
def test_a_key_does_not_tell_of_a_hidden_run_in_another_session(mixed: Any, door: str) -> None:
    reader, hidden, seen = mixed
    ann = type(reader).objects.get(username=hidden.owner_name)
    other = start_run("hr", "Fire Carl", "s2", owner=ann, idempotency_key="payroll")
    body: dict[str, Any] = {"idempotency_key": "payroll"}
    if door == "messages":
        answer = Api(reader).post("/sessions/s1/messages", {"content": "x", **body})
    elif door == "runs":
        answer = Api(ann).post("/runs", {"agent": "chat", "input": "x", **body})
    else:
        answer = Api(ann).post(f"/runs/{seen.pk}/fork", {"at": seen.messages.earliest("seq").seq, **body})
    assert answer[0] in (403, 409)
    for secret in (str(other.pk), "hr", "s2", "queued"):
        assert secret not in str(answer[1]), answer


def test_the_program_is_told_of_every_run(mixed: Any) -> None:
    _reader, hidden, seen = mixed
    other = start_run("hr", "Fire Carl", "s2", idempotency_key="payroll")
    with pytest.raises(RunStateError, match=str(other.pk)):
        start_run("chat", "x", "s2", idempotency_key="payroll")
    owner = type(_reader).objects.get(username=hidden.owner_name)
    assert fork_run(seen.pk, seen.messages.latest("seq").seq, text="and?", owner=owner)


def test_refusals_do_not_name_a_hidden_open_run(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Hides"
    chat("hr", GATED)
    chat("chat")
    ann = make_user("ann")
    run_agent("chat", "hello", "s1", actor=ann)
    hidden = run_agent("hr", "Fire", "s1", actor=ann).run_id
    for agent in ("chat", "hr"):
        said, asked = {"content": "x"}, {"input": "x", "session": "s1"}
        for path, body in (("/sessions/s1/messages", said), ("/runs", asked)):
            status, problem = Api(ann).post(path, {"agent": agent, **body})
            assert (status, problem["type"]) == (409, "urn:agentruns:session-busy")
            assert str(hidden) not in str(problem)
            assert "run_id" not in problem
    assert Message.objects.filter(run=hidden, kind="user").count() == 1, "nothing was said in it"
