"""The hostile server over both transports: what was sent happened once, what is not known is in doubt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentruns import ToolRefused, adopt_definition, approve, resume_run, run_agent
from agentruns.exceptions import DurableConfigMismatchError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.tools import ToolContext, mcp as declared
from agentruns.tools.mcp import client
from tests.effects import Effects
from tests.mcp.hostile import HOSTILE as WORDS, PNG
from tests.mcp.servers import HOSTILE, NOBODY, Declare, acted, drive, results
from tests.settings import BRIEF
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

WAYS = [("hostile", "legacy", ""), ("hostile", "modern", "")]
WAYS += [("over_http", era, form) for era in ("legacy", "modern") for form in ("json", "sse")]
if BRIEF:  # each transport, era and form once
    WAYS = [("hostile", "legacy", ""), ("over_http", "legacy", "sse"), ("over_http", "modern", "json")]


@pytest.fixture(params=WAYS, ids=["-".join(filter(None, way)) for way in WAYS])
def declare(request: pytest.FixtureRequest) -> Declare:
    """The hostile server over each transport, in each era of the protocol, and each form of an answer."""
    fixture, era, form = request.param
    made = request.getfixturevalue(fixture)
    return lambda **options: made(**{"ERA": era, "FORM": form, **options})


@pytest.fixture(params=["hostile", "over_http"])
def either(request: pytest.FixtureRequest) -> Declare:
    """The hostile server over each transport."""
    made: Declare = request.getfixturevalue(request.param)
    return made


def test_a_call_is_an_ordinary_call(declare: Declare, effects: Effects) -> None:
    tools = declare()
    run = drive(tools, "post", text="hello")
    assert run.status == "completed"
    assert results(run) == ["post: hello"]
    started = Message.objects.get(run=run, kind="tool_started")
    assert effects.count(started.payload["key"]) == 1, "the server is told the idempotency key"
    assert problems(run.session_id) == []
    (content,) = results(drive(tools, "picture"))
    assert [block["type"] for block in content] == ["image", "text", "text", "text", "text", "text"]
    assert (content[0]["media_type"], content[0]["size"]) == ("image/png", len(PNG))
    texts = [block["text"] for block in content[1:]]
    assert "left out: " in texts[0]
    assert texts[2:] == ["[resource more: file:///etc/passwd]", "inside", '{"total":3}']


def test_a_person_is_asked_of_what_the_schema_takes_unless_the_project_says_otherwise(
    hostile: Declare, effects: Effects
) -> None:
    tools = hostile(requires_approval=True)
    run = drive(tools, "post", text=3, more=True)
    assert run.status == "completed"
    assert "3 is not of type 'string'" in results(run)[0] and "'more' was unexpected" in results(run)[0]
    run = drive(tools, "post", text="hello")
    assert (run.status, acted(effects, "post")) == ("awaiting-approval", 0)
    approve(Approval.objects.get().pk, None)
    resume_run(run.pk)
    assert acted(effects, "post") == 1


def test_hints_are_not_believed_unless_the_project_does(hostile: Declare, effects: Effects) -> None:
    by_name = {tool.name: tool for tool in hostile()}
    assert by_name["h__liar"].recovery == "nothing"
    by_name = {tool.name: tool for tool in hostile(requires_approval=True, trust_hints=True)}
    assert (by_name["h__liar"].recovery, by_name["h__liar"].requires_approval) == ("safe_to_retry", False)
    assert (by_name["h__post"].recovery, by_name["h__post"].requires_approval) == ("nothing", True)
    by_name = {tool.name: tool for tool in hostile(requires_approval=True, read_only=["post"])}
    assert (by_name["h__post"].recovery, by_name["h__post"].requires_approval) == ("safe_to_retry", False)
    assert by_name["h__liar"].requires_approval is True
    assert by_name["h__liar"].policy()["origin"]["hints"] == {"readOnlyHint": True, "idempotentHint": True}


@pytest.mark.parametrize("name", ["silent", "dies"])
def test_no_answer_is_in_doubt_and_held(either: Declare, effects: Effects, name: str) -> None:
    run = drive(either(timeout=4), name)
    assert run.status == "orphaned"
    wait_for(lambda: acted(effects, name) == 1, "the server to read the call")
    resume_run(run.pk)
    run.refresh_from_db()
    assert acted(effects, name) == 1, "resuming tells the model, and sends nothing again"
    assert "tool-durability-error" in str(results(run))
    assert problems(run.session_id) == []


def test_a_read_that_gets_no_answer_is_sent_again(hostile: Declare, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 2
    run = drive(hostile(read_only=["dies"]), "dies")
    assert run.status == "paused"
    assert acted(effects, "dies") == 2


@pytest.mark.parametrize(
    "status, expected",
    [(403, "Nothing happened"), (409, ""), (502, "")],
    ids=["refused", "conflict", "gateway"],
)
def test_a_status_says_whether_anything_happened(
    over_http: Declare, effects: Effects, status: int, expected: str
) -> None:
    run = drive(over_http(ERA="modern"), "status", size=status)
    assert effects.count("status") == 1
    assert run.status == ("completed" if expected else "orphaned")
    assert not expected or expected in results(run)[0]


def test_a_status_that_refuses_does_so_with_words_of_the_protocol_too(
    over_http: Declare, effects: Effects
) -> None:
    """As of a server that was started anew, and knows our session no more: the next call opens another."""
    gone = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "Session not found"}}
    tools = over_http()
    refused = {"size": 404, "text": json.dumps(gone)}
    run = drive(tools, "status", call("h__post", text="next"), **refused)
    first, second = results(run)
    assert first == "ToolRefused: HTTP status 404: Session not found Nothing happened."
    assert (second, run.status) == ("post: next", "completed")
    (broken,) = results(drive(tools, "status", size=502, text=json.dumps(gone)))
    assert "may or may not have happened" in broken
    assert effects.count("status") == 2


def error(text: str, number: str = "null") -> str:
    return f'{{"jsonrpc": "2.0", "id": {number}, "error": {{"code": -32000, "message": "{text}"}}}}'


UNKNOWN = "Bad Request: No valid session ID provided"


@pytest.mark.parametrize(
    ("at", "status", "body", "kind"),
    [
        (["tools/call 2"], 404, error("Session not found"), "application/json"),
        (["tools/call 2"], 404, error("Session not found", "$id"), "application/json"),
        (["tools/call 2"], 404, "<html><h1>404 Not Found</h1></html>", "text/html"),
        (["tools/call 1"], 404, "", "text/plain"),
        (["tools/call 2"], 400, UNKNOWN, "text/plain"),
        (["tools/call 2"], 400, error(UNKNOWN), "application/json"),
        (["tools/call 2"], 400, error("Bad Request: Server not initialized"), "application/json"),
        (["tools/list 2"], 404, error("Session not found"), "application/json"),
        (["tools/list 2", "tools/call 2"], 404, "Not Found", "text/plain"),
    ],
)
def test_a_call_in_a_session_that_the_server_forgot_is_sent_again_in_a_new_one(
    over_http: Declare, effects: Effects, at: list[str], status: int, body: str, kind: str
) -> None:
    """It executed nothing, and the protocol demands a new session; for the journal it is one attempt."""
    tools = over_http(FORGETS=json.dumps({"at": at, "status": status, "body": body, "type": kind}))
    run = drive(tools, "post", call("h__post", text="two"), text="one")
    assert (run.status, results(run)) == ("completed", ["post: one", "post: two"])
    started = Message.objects.filter(run=run, kind="tool_started")
    assert [effects.count(row.payload["key"]) for row in started] == [1, 1]
    assert problems(run.session_id) == []


@pytest.mark.parametrize(
    ("at", "status", "body", "expected"),
    [
        (["tools/call 1", "tools/call 2"], 404, "gone", "status 404 (in a new session, too) Nothing"),
        (["tools/call 1"], 404, error("no such order", "$id"), "no such order Nothing happened."),
        (["tools/call 1"], 400, error("Session not found", "$id"), "Session not found Nothing happened."),
        (["tools/call 1"], 400, error("no such order"), "no such order Nothing happened."),
        (["tools/call 1"], 409, error("Session not found"), ""),
        (["tools/call 1"], 503, error(UNKNOWN), ""),
        (["initialize 2", "tools/call 1"], 404, "gone", "no MCP server answers at this URL"),
    ],
)
def test_what_does_not_say_that_the_session_is_unknown_is_sent_once(
    over_http: Declare, effects: Effects, at: list[str], status: int, body: str, expected: str
) -> None:
    run = drive(over_http(FORGETS=json.dumps({"at": at, "status": status, "body": body})), "post", text="one")
    assert run.status == ("completed" if expected else "orphaned")
    assert not expected or expected in results(run)[0]
    assert acted(effects, "post") == 0


def test_an_answer_that_breaks_off_is_in_doubt_although_its_session_is_unknown_then(
    over_http: Declare, effects: Effects
) -> None:
    """The SDK asks for the rest, and gets 404: the call itself had been accepted."""
    run = drive(over_http(FORGETS=json.dumps({"at": [], "status": 404, "body": ""})), "broken")
    assert (run.status, effects.count("broken")) == ("orphaned", 1)


def test_a_server_that_comes_back_with_other_tools_gets_no_call(
    over_http: Declare, effects: Effects, tmp_path: Path
) -> None:
    tools = over_http(FORGETS=json.dumps({"at": ["tools/call 1"], "status": 404, "body": ""}))
    (server,) = declared.servers()
    server.listed(NOBODY)
    (tmp_path / "changed").touch()
    with pytest.raises(client.McpChanged):
        server.send("post", 30, arguments={"text": "one"}, ctx=NOBODY)
    assert acted(effects, "post") == 0 and tools


def test_a_url_without_a_server_is_told(over_http: Declare) -> None:
    over_http()
    (server,) = declared.servers()
    target = client.Target(url=server.target.url.replace("/mcp", "/gone"))
    with pytest.raises(ToolRefused, match="HTTP status 404: no MCP server answers at this URL"):
        client.list_tools(target, {})


def test_a_redirect_is_not_followed(over_http: Declare, effects: Effects) -> None:
    """The SDK would send the request again, to the same origin."""
    run = drive(over_http(ERA="modern"), "again")
    assert effects.count("again") == 1
    assert "may or may not have happened" in results(run)[0]


def test_a_second_answer_is_dropped(either: Declare, effects: Effects) -> None:
    run = drive(either(), "twice", call("h__post", text="next"), text="first")
    assert results(run) == ["twice: first", "post: next"]
    assert (acted(effects, "twice"), acted(effects, "post")) == (1, 1)


def test_an_error_or_an_answer_that_cannot_be_read_may_have_had_its_effect(
    declare: Declare, effects: Effects
) -> None:
    tools = declare()
    run = drive(tools, "garbage")
    assert (run.status, acted(effects, "garbage")) == ("orphaned", 1)
    for name in ("fails", "rejects"):
        run = drive(tools, name)
        assert run.status == "completed"
        assert "The effect may or may not have happened" in results(run)[0]
        row = Message.objects.get(run=run, kind="tool_result")
        assert row.payload["in_doubt"] is True


def test_nobody_answers_what_the_server_asks(declare: Declare, effects: Effects) -> None:
    run = drive(declare(), "asks")
    assert acted(effects, "asks") == 1
    answered = [line for line in effects.lines() if line["key"] == "answered"]
    if "asks for more" in results(run)[0]:  # of the modern era, in which it is a result
        assert "elicitation/create" in results(run)[0]
    else:
        assert results(run) == ["asked"]
        assert all(line["error"] for line in answered)
    assert run.status == "completed"


def test_a_result_is_kept_as_it_is_and_never_a_tool_or_a_template(hostile: Declare) -> None:
    tools = hostile(refuses=[lambda error: "(code -32602)" in str(error)])
    assert results(drive(tools, "words")) == [WORDS]
    (content,) = results(drive(tools, "misfit"))  # the SDK would raise, and nobody would know what it did
    assert [block["text"] for block in content] == ["no total", '{"sum":3}']
    assert results(drive(tools, "rejects"))[0].endswith("Nothing happened."), "as the project knows"


def test_a_result_of_many_megabytes_is_kept(either: Declare) -> None:
    size = 49 * 2**20
    run = drive(either(ERA="modern", timeout=600), "huge", size=size)
    assert run.status == "completed"
    assert [len(each) for each in results(run)] == [size]


def test_a_larger_one_is_in_doubt(either: Declare, effects: Effects) -> None:
    run = drive(either(ERA="modern", timeout=600), "huge", size=51 * 2**20)
    assert (run.status, acted(effects, "huge")) == ("orphaned", 1)


def test_a_changed_tool_makes_the_run_wait(either: Declare, effects: Effects, tmp_path: Path) -> None:
    tools = either()
    assert drive(tools, "post", text="one").status == "completed"
    (tmp_path / "changed").touch()
    run = drive(tools, "post", text="two")
    assert run.status == "paused"
    assert run.blocked_reason.startswith("tools_changed: the MCP server 'h' declares post in another way")
    assert not Message.objects.filter(run=run, kind="tool_started").exists()
    assert acted(effects, "post") == 1
    (tmp_path / "changed").unlink()
    resume_run(run.pk)
    assert acted(effects, "post") == 2


def test_a_change_of_a_tool_that_is_not_taken_is_none(hostile: Declare, tmp_path: Path) -> None:
    tools = hostile(allow=["words", "twice"])
    assert {tool.name for tool in tools} == {"h__words", "h__twice"}
    (tmp_path / "changed").touch()
    assert drive(tools, "words").status == "completed"


def test_headers_are_made_for_each_run_and_kept_nowhere(
    over_http: Declare, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    def headers(ctx: ToolContext) -> dict[str, str]:
        return {"X-Tenant": f"sesame-{ctx.context.get('tenant', 0)}"}

    caplog.set_level("DEBUG")
    tools = over_http(headers=headers, ERA="modern")
    for tenant in (7, 8):
        agent = shop_agent(f"t{tenant}", {"tools": [call("h__post", text="hi")]}, tools=tools)
        run_agent(agent, "do it", f"s{tenant}", context={"tenant": tenant})
    told = [line["x-tenant"] for line in effects.lines() if line["key"] == "headers"]
    assert told == ["sesame-7", "sesame-8"]
    rows = str([(row.payload, row.tool_name) for row in Message.objects.all()])
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("agentruns")]
    for text in (rows, str(shop_agent("d", tools=tools).definition()), str(logged)):
        assert "sesame" not in text and "secret" not in text


def test_a_server_that_is_away_refuses(tmp_path: Path, hostile: Declare, effects: Effects) -> None:
    file = tmp_path / "h.json"
    hostile()
    declared._servers.clear()
    for server in (["/nowhere/at-all"], "http://127.0.0.1:9/mcp"):
        tools = declared.mcp_tools(server, name="h", lock=file, requires_approval=False)
        declared._servers.clear()
        run = drive(tools, "post", text="hi")
        assert run.status == "completed"
        assert "cannot be reached" in results(run)[0]
        assert results(run)[0].endswith("Nothing happened.")
    assert acted(effects, "post") == 0


def test_a_child_is_left_when_idle_and_another_one_started(
    hostile: Declare, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.3)
    tools = hostile(CLOSES="yes")
    drive(tools, "post", text="one")
    wait_for(lambda: effects.count("input closed") > 0, "the end of the child")
    ended = effects.count("input closed")
    drive(tools, "post", text="two")
    assert acted(effects, "post") == 2
    pid = next(line["pid"] for line in effects.lines() if line["key"] == "input closed")
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the child to be gone")
    wait_for(lambda: effects.count("input closed") > ended, "the end of the other")


def test_a_list_without_end_holds_no_worker(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits for it before its first call; each page by itself comes in time."""
    monkeypatch.setattr(client, "CONNECT_SECONDS", 3.0)
    environment = (("LEDGER", str(effects.path)), ("PAGES", "1"))
    with pytest.raises(ToolRefused, match="cannot be reached: TimeoutError"):
        client.list_tools(client.Target(command=(sys.executable, HOSTILE), env=environment), {})


def test_a_call_whose_time_is_over_before_the_server_answers_is_never_sent(effects: Effects) -> None:
    """By then it may be in doubt, and a person may have said that it did not happen."""
    environment = (("LEDGER", str(effects.path)), ("SLEEPS", "1.5"))
    target = client.Target(command=(sys.executable, HOSTILE), env=environment)
    with pytest.raises(ToolRefused, match=r"not reached within 0\.5 s"):
        client.call_tool(target, {}, "slow", {"size": 0}, key="k", timeout=0.5, why_not=lambda listed: "")
    client.call_tool(target, {}, "slow", {"size": 0}, key="other", timeout=120, why_not=lambda listed: "")
    assert [line["key"] for line in effects.lines()] == ["other"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "sesame\n"}, {"X": "sésame"}, {"X": "Bearer sesame "}, {"X Y": "sesame"},
        lambda ctx: {"X": ctx.context["no"]},
    ],
)  # fmt: skip
def test_headers_that_cannot_be_sent_are_not_told(over_http: Declare, effects: Effects, headers: Any) -> None:
    over_http(ERA="modern")
    (server,) = declared.servers()
    server.headers = headers
    options: dict[str, Any] = {"lock": server.file, "headers": headers, "requires_approval": False}
    run = drive(declared.mcp_tools(server.target.url, name="h", **options), "post", text="hi")
    assert "cannot be made: " in results(run)[0]
    assert results(run)[0].endswith("Nothing happened.")
    assert "same" not in results(run)[0]
    assert acted(effects, "post") == 0


@pytest.mark.parametrize("said", ["Bearer sesame-open", "the token sesame-open", "x" * 9_995 + "sesame-open"])
@pytest.mark.parametrize("name", ["fails", "rejects"])
def test_what_a_server_was_given_is_in_none_of_its_errors(
    either: Declare, name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that writes `invalid token` with the token."""
    caplog.set_level("DEBUG", "agentruns")
    tools = either(SECRET="sesame-open")
    (server,) = declared.servers()
    if server.target.url:
        server.headers = {"Authorization": "Bearer sesame-open"}
    run = drive(tools, name, text=said)
    result = Message.objects.get(run=run, kind="tool_result").payload["content"]
    assert "McpError: " in result and "sesame" not in result
    told = "\n".join(caplog.handler.format(r) for r in caplog.records if r.name.startswith("agentruns"))
    assert "McpError: " in told and "sesame" not in told
    shown = repr([server, server.target, *(vars(tool) for tool in tools)])
    assert "sesame" not in shown and "secret" not in shown


def test_each_value_of_a_query_is_a_secret() -> None:
    """Also of a name that stands there twice."""
    target = client.Target(url="http://user:first-secret@host/mcp?key=second-secret&key=third-secret")
    hidden = client.secrets_of(target, {}).hide("first-secret second-secret third-secret")
    assert "secret" not in hidden


@pytest.mark.parametrize(
    ("name", "given", "sent"), [("unread", {}, 2), ("status", {"size": 403, "text": "[" * 100_000}, 1)]
)
def test_half_an_answer_and_a_refusal_nested_deeply_leave_the_session_to_others(
    over_http: Declare, effects: Effects, name: str, given: Any, sent: int
) -> None:
    """The first is in doubt, and is sent again, which is safe; the second is a refusal."""
    tools = over_http(ERA="modern", safe_to_retry=True, parallel=True)
    turn = {"tools": [call("h__slow", size=2), call(f"h__{name}", **given)]}
    agent = shop_agent("pair", turn, tools=tools, on_orphan="surface")
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id)
    assert acted(effects, "slow") == 1 and "slow: " in results(run)
    assert min(effects.count(name), 2) == sent
    assert ("HTTP status 403" in str(results(run))) == (name == "status")


def test_a_new_lock_is_adopted(hostile: Declare, effects: Effects, tmp_path: Path) -> None:
    """A change: paused; the new file: another definition; adopted: the run goes on."""
    old = hostile()
    (tmp_path / "changed").touch()
    turn = {"tools": [call("h__post", text="hi")]}
    run = Run.objects.get(pk=run_agent(shop_agent("locked", turn, tools=old), "do it", "s1").run_id)
    assert run.status == "paused"
    (tmp_path / "h.json").unlink()
    declared._servers.clear()
    shop_agent("locked", turn, tools=hostile())
    with pytest.raises(DurableConfigMismatchError, match=r"tools\.h__post\.description"):
        resume_run(run.pk)
    adopt_definition(run.pk)
    resume_run(run.pk)
    run.refresh_from_db()
    assert (run.status, acted(effects, "post")) == ("completed", 1)
    assert problems(run.session_id) == []
