"""The fake speaks as the Messages API does, to the real SDK; faults, caching, threads, the end."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentruns.providers.scripted import ScriptedModel
from tests.fake_anthropic import FakeAnthropic, Fault
from tests.fake_anthropic.http import Server
from tests.fake_anthropic.tokens import PromptCache
from tests.unit import sdk

HELLO = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "claude-sonnet-5-5", "max_tokens": 4096, "messages": [HELLO]}
LOOK = {"name": "look", "input": {"id": "ä-17", "deep": {"list": [1, 2.5, None, True]}, "empty": {}}}
TURNS: list[Any] = [{"text": "Looking … 🔎", "tools": [LOOK, {"name": "look"}]}, {"text": "Done."}]
STRANGE: list[Any] = [
    {"type": "thinking", "thinking": "Let me see: ä."},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "block_of_the_future", "data": [1, {"b": None}], "n": 1e16},
    {"type": "text", "text": "So.", "citations": [{"type": "page", "cited_text": "x"}], "odd": {"a": 1}},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}, "caller": {"type": "direct"}},
]


@pytest.fixture
def fake() -> Iterator[FakeAnthropic]:
    with FakeAnthropic(TURNS) as running:
        yield running


def create(fake: FakeAnthropic, **changes: Any) -> Any:
    return fake.client().messages.create(**{**ASK, **changes})


def stream(fake: FakeAnthropic, **changes: Any) -> Any:
    with fake.client().messages.stream(**{**ASK, **changes}) as opened:
        return opened.get_final_message()


BOTH = pytest.mark.parametrize("ask", [create, stream])


def wire(message: Any) -> Any:
    return message.to_dict(mode="json", warnings=False)


def went_on(reply: Any, *results: str) -> list[Any]:
    """The conversation after a reply whose calls were answered."""
    content = wire(reply)["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in ids]
    return [HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": answers}]


# Answers


@BOTH
def test_the_turn_is_chosen_by_the_depth_of_the_conversation(fake: FakeAnthropic, ask: Any) -> None:
    first = ask(fake)
    content = wire(first)["content"]
    assert content[0] == {"type": "text", "text": "Looking … 🔎"}
    assert [block["input"] for block in content[1:]] == [LOOK["input"], {}]
    assert all(block["id"].startswith("toolu_") for block in content[1:])
    assert (first.role, first.type, first.model) == ("assistant", "message", "claude-sonnet-5-5")
    assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
    assert first.id.startswith("msg_")
    second = ask(fake, messages=went_on(first))
    assert wire(second)["content"] == [{"type": "text", "text": "Done."}]
    assert second.stop_reason == "end_turn"
    assert wire(ask(fake))["content"][0] == content[0], "it keeps no place in the script"


def test_every_generation_has_ids_of_its_own_unless_the_script_gives_them() -> None:
    with FakeAnthropic([{"tools": [{"name": "a"}, {"name": "b", "id": "toolu_given"}]}]) as fake:
        replies = [create(fake), create(fake), stream(fake)]
    assert len({reply.content[0].id for reply in replies}) == 3
    assert len({reply.id for reply in replies}) == 3
    assert {reply.content[1].id for reply in replies} == {"toolu_given"}


def test_request_ids_are_where_the_sdk_looks_for_them(fake: FakeAnthropic) -> None:
    client = fake.client()
    plain = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as opened:
        streamed = opened.request_id
    with pytest.raises(sdk.BadRequestError) as caught:
        client.messages.create(**{**ASK, "messages": []})
    ids = [plain._request_id, streamed, caught.value.request_id]
    assert ids == [call.request_id for call in fake.calls]
    assert all(each and each.startswith("req_") for each in ids) and len(set(ids)) == 3
    body: Any = caught.value.body
    assert body["request_id"] == ids[2]


@BOTH
def test_strange_blocks_come_as_scripted_and_go_back_unaltered(ask: Any) -> None:
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}]) as fake:
        reply = ask(fake)
        content = wire(reply)["content"]
        assert content[0].pop("signature")
        assert content == STRANGE
        assert reply.stop_reason == "tool_use"
        assert ask(fake, messages=went_on(reply)).content[0].text == "Done."
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}]) as again:
        assert ask(again, messages=went_on(reply)).content[0].text == "Done.", "known from the script"


def test_thinking_is_left_out_on_request_and_still_signed() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}]) as fake:
        for ask in (create, stream):
            reply = ask(fake, thinking=thinking)
            assert reply.content[0].thinking == "" and reply.content[0].signature
            assert ask(fake, messages=went_on(reply), thinking=thinking).stop_reason == "end_turn"


def test_the_events_of_a_stream(fake: FakeAnthropic) -> None:
    raw = fake.client().messages.with_streaming_response.create(**ASK, stream=True)
    with raw as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        data = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    kinds = [event["type"] for event in data]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (data[0]["message"]["content"], data[0]["message"]["stop_reason"]) == ([], None)
    assert data[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    partial = [
        event["delta"]["partial_json"] for event in data if event.get("index") == 1 and "delta" in event
    ]
    assert partial[0] == "" and len(partial) > 5 and json.loads("".join(partial)) == LOOK["input"]
    assert data[-2]["delta"]["stop_reason"] == "tool_use" and data[-2]["usage"]["output_tokens"] > 10


def test_stop_reasons_and_usage_of_the_script_are_said() -> None:
    turns = [{"content": [], "stop_reason": "refusal", "usage": {"input_tokens": 7, "odd": 1}}]
    with FakeAnthropic(turns) as fake:
        for reply in (create(fake), stream(fake)):
            assert (reply.content, reply.stop_reason) == ([], "refusal")
            assert reply.stop_details and reply.stop_details.type == "refusal"
            assert wire(reply)["usage"]["input_tokens"] == 7 and wire(reply)["usage"]["odd"] == 1
    with FakeAnthropic([{"content": [], "stop_reason": None}]) as fake:
        assert create(fake).stop_reason is None


def test_a_call_cut_short_looks_whole_in_a_stream() -> None:
    cut = {"type": "tool_use", "id": "toolu_1", "name": "refund", "input": '{"order": "42", "cents": 12'}
    with FakeAnthropic([{"content": [cut], "stop_reason": "max_tokens"}]) as fake:
        streamed, plain = stream(fake), create(fake)
    assert streamed.content[0].input == {"order": "42", "cents": 12}, "only the stop_reason tells"
    assert plain.content[0].input == {}
    assert streamed.stop_reason == plain.stop_reason == "max_tokens"


def test_a_reply_of_no_tokens_only_warms_the_cache(fake: FakeAnthropic) -> None:
    reply = create(fake, max_tokens=0, system="x" * 100, cache_control={"type": "ephemeral"})
    assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "max_tokens", 0)
    assert reply.usage.cache_creation_input_tokens > 25


def test_a_script_may_be_a_function_or_a_model() -> None:
    with FakeAnthropic(lambda body: {"text": body["messages"][-1]["content"].upper()}) as fake:
        assert create(fake).content[0].text == "HI"
    with FakeAnthropic(ScriptedModel([lambda request: {"text": f"step {request.step}"}])) as fake:
        assert create(fake).content[0].text == "step 0"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([], "script exhausted: The script has 0 turns and was asked for number 1."),
        (lambda body: {"txt": ""}, "The script failed: ValueError: Turn 1 has txt"),
        (lambda body: body["nothing"], "The script failed: KeyError: 'nothing'"),
        (lambda body: {"content": [{"type": "x", "n": object()}]}, "The script failed: TypeError"),
        ([{"content": [{"type": "tool_use", "id": "t"}]}], "ValueError: block 0 is a tool_use without name"),
        ([{"content": [{"text": "x"}]}], "The script failed: KeyError: 'type'"),
    ],
)
def test_a_script_that_cannot_go_on_is_a_400_so_that_nobody_retries(script: Any, text: str) -> None:
    with FakeAnthropic(script) as fake, pytest.raises(sdk.BadRequestError, match=text):
        create(fake)


# Tokens and the cache


def test_counting_tokens_agrees_with_the_bill(fake: FakeAnthropic) -> None:
    tools = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]
    asked: dict[str, Any] = {"model": ASK["model"], "messages": [HELLO], "tools": tools, "system": "Help."}
    counted = fake.client().messages.count_tokens(**asked).input_tokens
    usage = create(fake, **asked).usage
    assert counted == usage.input_tokens > 10
    assert usage.cache_creation_input_tokens == usage.cache_read_input_tokens == 0
    longer = fake.client().messages.count_tokens(**{**asked, "system": "Help." + 40 * "x"}).input_tokens
    assert longer == counted + 10
    assert [call.number for call in fake.calls] == [0, 1, 0]


def paid(usage: Any) -> tuple[int, int, int]:
    return usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens


@BOTH
def test_the_longest_known_prefix_is_read_and_the_rest_is_written(fake: FakeAnthropic, ask: Any) -> None:
    options: dict[str, Any] = {"system": "x" * 400, "cache_control": {"type": "ephemeral"}}
    first = ask(fake, **options)
    rest, created, read = paid(first.usage)
    assert rest == read == 0 and created > 100
    assert first.usage.cache_creation.ephemeral_5m_input_tokens == created
    assert paid(ask(fake, **options).usage) == (0, 0, created), "asked again after a crash: read"
    second = ask(fake, messages=went_on(first), **options)
    rest, more, read = paid(second.usage)
    assert (rest, read) == (0, created) and more > 0
    assert paid(ask(fake, messages=went_on(first), **options).usage) == (0, 0, created + more)
    fake.cache.clear()
    assert paid(ask(fake, **options).usage) == (0, created, 0), "a person took longer than the cache lives"


def test_a_breakpoint_caches_what_is_before_it_and_nothing_else(fake: FakeAnthropic) -> None:
    long = {"type": "text", "text": "x" * 400, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    rest, created, read = paid(create(fake, system=[long]).usage)
    assert rest > 0 and created > 100 and read == 0
    again = create(fake, system=[long], messages=[{"role": "user", "content": "something else"}])
    assert paid(again.usage)[1:] == (0, created)
    assert create(fake, system=[long], model="claude-opus-5").usage.cache_read_input_tokens == 0
    changed = create(fake, system=[{**long, "text": "y" + "x" * 399}])
    assert paid(changed.usage)[1:] == (created, 0)
    assert changed.usage.cache_creation.ephemeral_1h_input_tokens == created
    assert create(fake, system=[{"type": "text", "text": "x" * 400}]).usage.cache_read_input_tokens == 0


def test_short_prefixes_are_not_cached_and_entries_end() -> None:
    now = [0.0]
    body = {
        **ASK,
        "messages": [{"role": "user", "content": "x" * 80}],
        "cache_control": {"type": "ephemeral"},
    }
    assert PromptCache(1000).usage(body)["cache_creation_input_tokens"] == 0
    cache = PromptCache(8, clock=lambda: now[0])
    first = cache.usage(body)["cache_creation_input_tokens"]
    for seconds, read in ((299, first), (598, first), (900, 0), (901, first)):
        now[0] = seconds
        assert cache.usage(body)["cache_read_input_tokens"] == read, seconds


def test_an_entry_more_than_twenty_blocks_back_is_not_found(fake: FakeAnthropic) -> None:
    def asked(blocks: int) -> Any:
        content = [{"type": "text", "text": f"block number {n}"} for n in range(blocks)]
        messages = [{"role": "user", "content": content}]
        return create(fake, messages=messages, cache_control={"type": "ephemeral"}).usage

    first = asked(5).cache_creation_input_tokens
    assert asked(24).cache_read_input_tokens == first
    fake.cache.clear()
    asked(5)
    assert asked(25).cache_read_input_tokens == 0


# Faults

# Each status, and what breaks off or comes late, is met by the provider in test_anthropic_errors.py.


@BOTH
def test_a_status(fake: FakeAnthropic, ask: Any) -> None:
    fake.fault(529, retry_after=17, retry_after_ms=1500, error_code="some_code", message="No.")
    with pytest.raises(sdk.OverloadedError) as caught:
        ask(fake)
    error = caught.value
    assert (error.status_code, error.type) == (529, "overloaded_error")
    assert (error.api_message, error.error_code) == ("No.", "some_code")
    assert error.response.headers["retry-after"] == "17"
    assert error.response.headers["retry-after-ms"] == "1500"
    assert error.request_id == fake.calls[0].request_id
    assert (fake.calls[0].status, fake.calls[0].fault, fake.calls[0].error) == (529, "529", "No.")
    assert ask(fake).stop_reason == "tool_use", "as if the request had never been"


@BOTH
def test_a_connection_dropped_before_the_answer(fake: FakeAnthropic, ask: Any) -> None:
    fake.fault("drop")
    with pytest.raises(sdk.APIConnectionError) as caught:
        ask(fake)
    assert isinstance(caught.value.__cause__, httpx2.RemoteProtocolError)
    assert (fake.calls[0].status, fake.calls[0].fault) == (0, "drop")


def test_faults_are_planned_by_number_and_for_several_requests() -> None:
    faults = {2: 529, 4: {"kind": "error", "type": "rate_limit_error", "times": 2}, 6: Fault(500)}
    with FakeAnthropic(TURNS, faults=faults) as fake:
        for _ in range(7):
            try:
                create(fake)
            except sdk.APIStatusError:  # what is not asked of the model is not counted
                fake.client().messages.count_tokens(model=ASK["model"], messages=ASK["messages"])
        assert [call.status for call in fake.calls if call.number] == [200, 529, 200, 429, 429, 500, 200]
        with pytest.raises(ValueError, match="number 3 has been answered"):
            fake.fault(500, at=3)
        fake.fault(500, at=9, times=2)
        fake.fault("drop", at=10)
        assert create(fake).stop_reason == "tool_use"
        with pytest.raises(sdk.InternalServerError):
            create(fake)
        with pytest.raises(sdk.APIConnectionError):
            create(fake)


@pytest.mark.parametrize("wrong", [{"kind": 200}, {"kind": "dorp"}, {"kind": 500, "times": 0}])
def test_a_fault_that_is_none_is_found_at_once(wrong: Any) -> None:
    with pytest.raises(ValueError, match="fault"):
        Fault(**wrong)


def test_the_retries_of_the_sdk_are_requests_like_others(fake: FakeAnthropic) -> None:
    fake.fault(529, times=2, retry_after_ms=1)
    assert fake.client(max_retries=2).messages.create(**ASK).stop_reason == "tool_use"
    assert [call.headers["x-stainless-retry-count"] for call in fake.calls] == ["0", "1", "2"]


# The log, threads, processes, the end


def test_the_log_shows_what_was_asked_without_the_key(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with FakeAnthropic(TURNS, api_key="sk-ant-secret", log=path) as fake:
        create(fake)
        httpx2.post(f"{fake.url}/v1/messages", headers={"X-API-Key": "sk-ant-secret"}, content=b"{")
        calls = fake.calls
    assert calls[0].body == ASK and calls[0].path == "/v1/messages" and calls[0].method == "POST"
    assert calls[0].headers["authorization"] == "Bearer ***" and calls[1].headers["x-api-key"] == "***"
    text = path.read_text()
    assert "sk-ant-secret" not in text + repr(calls)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["number"], line["status"]) for line in lines] == [(1, 200), (2, 400)]
    assert lines[0]["body"] == ASK


def test_ten_threads_at_once(fake: FakeAnthropic) -> None:
    client = fake.client()
    together = threading.Barrier(10)

    def work(_: int) -> list[str]:
        together.wait()
        first = client.messages.create(**ASK)
        with client.messages.stream(**{**ASK, "messages": went_on(first)}) as opened:
            second = wire(opened.get_final_message())
        return [first.content[1].id, second["content"][0]["text"]]

    with ThreadPoolExecutor(10) as pool:
        done = list(pool.map(work, range(10)))
    assert len({id for id, _ in done}) == 10 and {text for _, text in done} == {"Done."}
    assert sorted(call.number for call in fake.calls) == list(range(1, 21))
    assert {call.status for call in fake.calls} == {200}


def test_it_stops_at_once_and_leaves_nothing() -> None:
    before = set(threading.enumerate())
    fake = FakeAnthropic(TURNS).start()
    with pytest.raises(RuntimeError, match="running already"):
        fake.start()
    idle = socket.create_connection(("127.0.0.1", int(fake.url.rpartition(":")[2])))
    create(fake)  # its connection is kept alive
    fake.fault("slow", delay=600)
    failed: list[type[Exception]] = []

    def wait() -> None:
        try:
            stream(fake)
        except Exception as error:
            failed.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while len(fake.calls) < 2:
        waiting.join(0.01)
    port = fake.url.rpartition(":")[2]
    fake.stop()
    waiting.join(10)
    assert not waiting.is_alive() and len(failed) <= 1
    assert idle.recv(1) == b""
    idle.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
    with pytest.raises(RuntimeError, match="not running"):
        fake.url  # noqa: B018
    fake.stop()
    fake.port = int(port)
    with fake:
        assert fake.url.endswith(f":{port}"), "down for a while, and up again where it was"
        assert create(fake).stop_reason == "tool_use"


def test_a_mistake_in_the_fake_itself_is_not_silent(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("a mistake")

    server = Server(0, broken)
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.post(f"http://127.0.0.1:{server.server_address[1]}/v1/messages")
    server.stop()
    assert "LookupError: a mistake" in capfd.readouterr().err


def test_the_sdk_finds_it_in_its_environment(fake: FakeAnthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    with sdk.Anthropic() as client:
        assert client.messages.create(**ASK).stop_reason == "tool_use"


def test_it_runs_as_a_program_of_its_own(tmp_path: Path) -> None:
    script, log = tmp_path / "script.json", tmp_path / "calls.jsonl"
    script.write_text(json.dumps({"turns": TURNS, "faults": {"2": {"kind": 529, "retry_after": 3}}}))
    command = [sys.executable, "-m", "tests.fake_anthropic", str(script), "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        given = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        with sdk.Anthropic(
            base_url=given["ANTHROPIC_BASE_URL"], api_key=given["ANTHROPIC_API_KEY"], max_retries=0
        ) as client:
            assert client.messages.create(**ASK).stop_reason == "tool_use"
            with pytest.raises(sdk.OverloadedError):
                client.messages.create(**ASK)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [200, 529]


def test_importing_it_imports_neither_the_sdk_nor_django() -> None:
    code = (
        "import sys, tests.fake_anthropic;"
        "print([m for m in ('anthropic', 'httpx2', 'django') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
