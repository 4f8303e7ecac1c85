"""Whatever a model once said, and whatever changed since, the session's next task completes.

Every provider and dialect, every shape of a reply, every stop reason, every change in between. The fakes
refuse what the real providers are known to refuse.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from agentruns import Agent, adopt_definition, approve, fork_run, resume_run, run_again, run_agent
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.openai import OpenAIModel
from tests.db.helpers import sound
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.rebuild import examples
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = {"type": "text", "text": "I look."}
BLANK = {"type": "text", "text": " \n"}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
NO = {"type": "refusal", "refusal": "I can't."}


def post(number: int, **more: Any) -> dict[str, Any]:
    """Build the block of a call that has an effect."""
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "post", "input": {"text": "x"}, **more}


class Dialect(NamedTuple):
    """A provider or server: how it is asked, its reasoning, its own blocks, the members of its calls."""

    model: Callable[[Any], Any]
    thought: dict[str, Any]
    own: tuple[dict[str, Any], ...] = ()
    signed: dict[str, Any] = {}
    thinking: dict[str, Any] = {}  # the parameters that switch reasoning on or off
    stops: tuple[str, ...] = ("max_tokens", "content_filter")


def openai(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda fake: OpenAIModel(name, client=fake.client(), **options)


DIALECTS = {
    "claude": Dialect(
        lambda fake: AnthropicModel("claude-sonnet-5-5", fake.client()),
        {"type": "thinking", "thinking": "Hm."},
        (SEARCH, FOUND),
        thinking={"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096},
        stops=("max_tokens", "refusal", "pause_turn", "stop_sequence", "model_context_window_exceeded"),
    ),
    "responses": Dialect(
        openai("gpt-5.4", api="responses"), {"type": "reasoning"}, (SEARCHED,), thinking={"temperature": 1}
    ),
    "chat": Dialect(openai("gpt-4.1", api="chat"), TEXT, thinking={"temperature": 1}),
    "vllm": Dialect(
        openai("qwen3", provider="vllm"),
        {"type": "reasoning", "reasoning": "Hm."},
        thinking={"temperature": 1},
    ),
    "gemini": Dialect(
        openai("gemini-3-pro", provider="gemini", api="chat"),
        TEXT,
        signed={"extra_content": {"google": {"thought_signature": "c2ln"}}},
        thinking={"temperature": 1},
    ),
    "deepseek": Dialect(
        openai("deepseek-v4", provider="deepseek", api="chat"),
        {"type": "reasoning", "reasoning_content": "Hm."},
        thinking={"temperature": 1},
    ),
}


def replies(dialect: Dialect) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each content with each stop reason that its provider may give it."""
    thought, call = dialect.thought, post(1, **dialect.signed)
    contents: dict[str, list[dict[str, Any]]] = {
        "text": [TEXT],
        "blank": [BLANK],
        "empty": [],
        "thought": [thought],
        "thought and text": [thought, TEXT],
        "call": [call],
        "thought and call": [thought, call],
        "thought, text, two calls": [thought, TEXT, call, post(2)],
        "blank and call": [BLANK, call],
        "own": [*dialect.own, TEXT],
        "own without an end": [*dialect.own[:1], call],
        "refusal": [NO] if thought is not DIALECTS["claude"].thought else [TEXT],
    }
    for name, content in contents.items():
        usual = "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"
        for stop in dict.fromkeys((usual, "end_turn", *dialect.stops)):
            if stop == "pause_turn" and not name.startswith("own"):
                continue  # only the provider's own tools pause a turn
            yield f"{name}: {stop}", {"content": content, "stop_reason": stop}


class World:
    """The fakes of one example. The first request of the dialect under test gets the odd reply."""

    def __init__(self, stack: ExitStack, name: str, odd: dict[str, Any], session: str) -> None:
        self.name, self.odd, self.session = name, [odd], session
        self.fakes: dict[str, Any] = {}
        for each in (name, "claude" if name != "claude" else "responses"):
            kind = FakeAnthropic if each == "claude" else FakeOpenAI
            says = self.says if each == name else lambda _body: {"text": "Here I am."}
            self.fakes[each] = stack.enter_context(kind(says))
        self.other = next(each for each in self.fakes if each != name)

    def says(self, _body: Any) -> dict[str, Any]:
        return self.odd.pop() if self.odd else {"text": "All done."}

    def agent(self, name: str = "", fallback: str = "", **options: Any) -> Agent:
        """Build the agent again, on one of the models."""
        model = DIALECTS[name or self.name].model(self.fakes[name or self.name])
        second = DIALECTS[fallback].model(self.fakes[fallback]) if fallback else None
        return Agent(
            "talks", instructions="Help.", model=model, fallback=second, tools=TOOLS,
            unjournaled_tools=True, starters="anyone", **options,
        )  # fmt: skip

    def refused(self) -> list[str]:
        """List what the fakes refused."""
        return [
            call.error for fake in self.fakes.values() for call in fake.calls if call.status in (400, 413)
        ]


def nothing(world: World) -> tuple[Agent, str]:
    run_agent(agent := world.agent(), "one", world.session)
    return agent, world.session


def another_provider(world: World) -> tuple[Agent, str]:
    """Ask another provider in between."""
    run_agent(world.agent(), "one", world.session)
    with isolated_registry():
        assert run_agent(world.agent(world.other), "between", world.session).status == "completed"
    return world.agent(), world.session


def a_fallback(world: World) -> tuple[Agent, str]:
    """Get the odd reply from a fallback, and ask the first model again."""
    world.fakes[world.other].fault(529 if world.other == "claude" else 503, at=1)
    result = run_agent(agent := world.agent(world.other, fallback=world.name), "one", world.session)
    if result.status == Run.Status.QUEUED:  # a fallback without a usable reply: the first is asked later
        assert resume_run(result.run_id).status == "completed"
    return agent, world.session


def to_a_fallback(world: World) -> tuple[Agent, str]:
    """Get the odd reply from the first model, and go on with a fallback within the turn."""
    fault = 529 if world.name == "claude" else 503
    world.fakes[world.name].fault(fault, at=2)
    run_agent(agent := world.agent(fallback=world.other), "one", world.session)
    return agent, world.session


def an_adoption(world: World) -> tuple[Agent, str]:
    """Switch reasoning on while a run waits."""
    world.odd[0] = {**world.odd[0], "content": [*world.odd[0]["content"], GATED]}
    result = run_agent(world.agent(), "one", world.session)
    with isolated_registry():
        agent = world.agent(model_params=DIALECTS[world.name].thinking)
        if result.status == Run.Status.AWAITING_APPROVAL:
            adopt_definition(result.run_id, reason="a deploy")
            for approval in Approval.objects.filter(run_id=result.run_id, status="pending"):
                approve(approval.pk, None, digest=approval.digest)
            assert resume_run(result.run_id).status == "completed"
    return agent, world.session


GATED = {"type": "tool_use", "id": "toolu_9", "name": "refund", "input": {"cents": 5000}}


def a_fork(world: World) -> tuple[Agent, str]:
    """Go on from the odd reply's row in another session."""
    result = run_agent(agent := world.agent(), "one", world.session)
    row = Message.objects.filter(run_id=result.run_id, kind=events.ASSISTANT).order_by("seq").first()
    if row is None:
        return agent, world.session
    fork = fork_run(result.run_id, row.seq, text="And now?", session=f"{world.session} fork")
    assert resume_run(fork.pk).status == "completed"
    return agent, f"{world.session} fork"


def again(world: World) -> tuple[Agent, str]:
    """Run the same task again."""
    result = run_agent(agent := world.agent(), "one", world.session)
    assert resume_run(run_again(result.run_id, None).pk).status == "completed"
    return agent, Run.objects.order_by("-pk").first().session.key  # type: ignore[union-attr]


CHANGES = (nothing, another_provider, a_fallback, to_a_fallback, an_adoption, a_fork, again)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", DIALECTS)
def test_the_next_task_completes(name: str, change: Any, effects: Effects) -> None:
    every = examples(1, brief=6, long=1)  # one example in so many, others for each change
    failed = []
    for told, odd in replies(DIALECTS[name]):
        if zlib.crc32(f"{change.__name__} {told}".encode()) % every:
            continue
        with ExitStack() as stack, isolated_registry():
            world = World(stack, name, odd, told)
            try:
                agent, session = change(world)
                ended = run_agent(agent, "two", session)
                assert (ended.status, world.refused()) == ("completed", [])
                sound(Run.objects.get(pk=ended.run_id))
            except Exception as error:
                failed.append(f"{told}: {type(error).__name__} {error} {world.refused()}")
    assert not failed, "\n".join(failed)
