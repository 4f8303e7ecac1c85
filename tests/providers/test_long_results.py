"""Results longer than a model's window: the run that read them ends, and so does the session's next task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentruns import Agent, Image, Text, ToolContext, fork_run, read_result, replay_run, run_agent, tool
from agentruns.exceptions import ToolRefused
from agentruns.models import Message, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.openai import OpenAIModel
from agentruns.providers.window import drop_oldest
from agentruns.services.data.erasure import erase_call
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.helpers import outcomes, payloads, sound, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.pictures import png
from tests.providers.asking import NAME, has_acted
from tests.shop.agents import act

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

PROVIDERS = pytest.mark.parametrize("provider", ["claude", "responses", "chat"])
LINES = "".join(f"{number:07d} line of a log\n" for number in range(52_000))  # 1.2 MB
PART = LINES[:230_000]
RESULTS: dict[str, Callable[[], Any]] = {
    "text": lambda: LINES,
    "JSON": lambda: {"lines": LINES.splitlines()},
    "texts": lambda: [*map(Text, LINES.splitlines()[::3]), Image(data=png())],
    "error": lambda: 1 / 0,
    "part": lambda: PART,
}


@tool
def dump(ctx: ToolContext, kind: str = "text") -> Any:
    """Write a log into the outside world, and return all of it."""
    act("dump", ctx)
    if kind == "error":
        raise ToolRefused(LINES)
    return RESULTS[kind]()


@tool(sensitive_results=["*"])
def vault() -> str:
    """Return a secret that is long."""
    return LINES


def asks(*names: str, **arguments: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "input": arguments} for name in names]}


def model_on(provider: str, fake: Any, **options: Any) -> Any:
    if provider == "claude":
        return AnthropicModel(NAME, fake.client(), **options)
    return OpenAIModel("gpt-4.1", api=provider, client=fake.client())  # type: ignore[arg-type]


def serving(provider: str, script: Any, **options: Any) -> Any:
    return (FakeAnthropic if provider == "claude" else FakeOpenAI)(script, **options)


def logging(model: Any, **options: Any) -> Agent:
    options = {"tools": [dump, vault, read_result], **options}
    return Agent("logger", instructions="Read logs.", model=model, **options)


def once(*names: str, **arguments: Any) -> Any:
    """Script a model that calls the tools at first, and is done after that."""
    return lambda body: {"text": "Done."} if has_acted(body) else asks(*names, **arguments)


def run_on(agent: Agent, session: str = "s1", **options: Any) -> Run:
    return the_run(run_agent(agent, "do it", session, idempotency_key=session, **options))


@PROVIDERS
@pytest.mark.parametrize("kind", ["text", "JSON", "texts", "error", "nine at once"])
def test_a_run_that_read_too_much_ends_and_so_do_its_fork_and_the_next_task(
    provider: str, kind: str, effects: Effects, settings: Any
) -> None:
    calls = 9 if kind == "nine at once" else 1
    with serving(provider, once(*["dump"] * calls, kind=kind if kind in RESULTS else "text")) as fake:
        agent = logging(model_on(provider, fake))
        run = run_on(agent)
        assert (run.status, effects.count()) == ("completed", calls)
        settings.AGENTRUNS_RESULT_SENT_MAX = 20_000
        assert run_agent(agent, "and now?", "s1").status == "completed"
        first, second = (json.dumps(call.body) for call in fake.calls if has_acted(call.body))
        assert len(second) < len(first) < 400_000
        assert first.count("characters are left out here") == calls
        assert all(f"{line:07d} line" in second for line in (0, 51_999))
        for model in (None, agent.model):  # what was sent for the replies is what it was
            assert replay_run(run.pk, model=model).is_equal
        fork = fork_run(run.pk, run.messages.latest("seq").seq, text="and then?")
        sweep()
        assert (sound(fork).status, sound(run).status, effects.count()) == ("completed", "completed", calls)


def test_a_result_is_sent_in_the_same_form_each_time(folder: Path) -> None:
    turns = iter([asks("dump"), {"text": "Done."}, {"text": "Yes."}])
    with FakeAnthropic(lambda body: next(turns)) as fake:
        agent = logging(model_on("claude", fake, cache=None))
        assert "name" in payloads(run_on(agent), "tool_result")[0]["stored"], "a file, which is read again"
        run_agent(agent, "again", "s1")
        first, second = (call.body["messages"] for call in fake.calls if has_acted(call.body))
    assert "left out here" in str(first[2]) and second[2]["content"][0] == first[2]["content"][0]


def reads_on(body: Any) -> dict[str, Any]:
    """Dump a log, and read what the note about it and then each page name, as a model would."""
    said = [block for message in body["messages"] for block in message["content"] if "content" in block]
    if not said:
        return asks("dump", kind="part")
    id, next = re.findall(r'read_result\(result="(.+)", offset=(\d+)\)', str(said[0]["content"]))[0]
    pages = [re.findall(r"; go on with offset=(\d+)", str(each["content"])) for each in said[1:]]
    offset = (pages or [[next]])[-1]
    return asks("read_result", result=id, offset=int(offset[0])) if offset else {"text": "Done."}


@pytest.mark.parametrize("where", ["inline", "stored"])
def test_the_model_reads_on_to_the_end_and_all_of_it_can_be_erased(where: str, request: Any) -> None:
    if where == "stored":
        request.getfixturevalue("folder")
    with FakeAnthropic(reads_on) as fake:
        run = run_on(logging(model_on("claude", fake)))
        (sent,) = fake.calls[1].body["messages"][2]["content"]
    head = sent["content"].partition("\n\n[")[0]
    pages = [each["content"] for each in payloads(run, "tool_result")[1:]]
    assert (run.status, {*outcomes(run)}) == ("completed", {"ok"})
    assert head + "".join(page.rpartition("\n\n[")[0] for page in pages) == PART
    assert pages[-1].endswith(f" to {len(PART)} of {len(PART)}]")
    erase_call(run.pk, run.messages.filter(kind="tool_result").earliest("seq").call_id, None, "request 17")
    assert not any("line of a log" in str(row.content) for row in Message.objects.all())
    assert sound(run).status == "completed"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"result": "toolu_none"}, "has no result 'toolu_none' to read. The last that it has: toolu_"),
        ({"result": "dump", "offset": 10**9}, f"has {len(LINES)} characters; offset must be smaller"),
        ({"result": "dump", "offset": -1}, "greater than or equal to 0"),
        ({"result": "dump", "length": 0}, "greater than or equal to 1"),
        ({"result": "vault"}, "has no result"),
        ({"result": "of another session"}, "has no result"),
        ({"result": "of this reply"}, "has no result"),
    ],
)
def test_only_results_of_this_session_that_the_model_was_sent_are_read(
    arguments: dict[str, Any], why: str, effects: Effects
) -> None:
    def turn(request: Any) -> dict[str, Any]:
        ids.update({block["name"]: block["id"] for block in request.messages[1]["content"]})
        again = {"type": "tool_use", "id": "toolu_again", "name": "dump", "input": {}}
        given = {**arguments, "result": ids.get(arguments["result"], arguments["result"])}
        reading = {"type": "tool_use", "id": "toolu_read", "name": "read_result", "input": given}
        return {"content": [again, reading], "stop_reason": "tool_use"}

    other = run_on(logging(ScriptedModel([asks("dump"), {"text": "Done."}])), "s2")
    ids = {"of another session": payloads(other, "assistant")[0]["calls"][0]["provider_id"]}
    ids["of this reply"] = "toolu_read"
    run = run_on(logging(ScriptedModel([asks("dump", "vault"), turn, {"text": "Done."}])))
    answer = run.messages.get(kind="tool_result", tool_name="read_result").payload
    assert (run.status, answer["is_error"], effects.count()) == ("completed", True, 3)
    assert why in answer["content"] and "0000001 line" not in answer["content"]


@pytest.mark.parametrize(("name", "tools"), [("dump", [dump]), ("vault", [vault, read_result])])
def test_the_note_names_no_tool_that_would_not_read(name: str, tools: list[Any]) -> None:
    asked: list[Any] = []
    model = ScriptedModel([asks(name), lambda request: asked.append(request.messages) or {"text": "Done."}])
    assert run_on(logging(model, tools=tools)).status == "completed"
    assert "characters are left out here" in str(asked) and "read_result" not in str(asked)


@pytest.mark.parametrize("kind", ["text", "nine at once"])
def test_compact_shortens_the_newest_exchange_too(kind: str, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_RESULT_SENT_MAX = None
    calls = 9 if kind == "nine at once" else 1
    with FakeAnthropic(once(*["dump"] * calls), window=20_000) as fake:
        model = model_on("claude", fake, compact=drop_oldest, context_window=20_000)
        run = run_on(logging(model))
        assert run_agent(logging(model), "and now?", "s1").status == "completed"
    assert (run.status, effects.count()) == ("completed", calls)
