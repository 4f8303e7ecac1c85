"""Files that a provider refuses: no input with one is stored, and no result with one stops its session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentruns import Agent, Document, Image, Text, content, run_agent, send_message, tool
from agentruns.exceptions import ContentError
from agentruns.models import Message, Run
from agentruns.providers.anthropic import AnthropicModel
from tests.db.helpers import the_run
from tests.fake_anthropic import FakeAnthropic
from tests.files import row_of
from tests.pictures import PNG, UNFIT
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

LIMITED = {"many pixels", "many pages"}  # by a provider only: stored for people, not sent


def block_of(kind: str) -> content.File:
    name, data, _ = UNFIT[kind]
    return (Document if name.endswith("pdf") else Image)(data=data, name=name)


@tool
def fetch(kind: str) -> list[Any]:
    """Fetch a file and a picture.

    Args:
        kind: which file
    """
    return [Text("before"), block_of(kind), Image(data=PNG, name="good.png"), "after"]


@pytest.fixture
def claude() -> Iterator[Any]:
    started: list[FakeAnthropic] = []

    def declare(*turns: Any) -> FakeAnthropic:
        started.append(FakeAnthropic(turns).start())
        model = AnthropicModel("claude-sonnet-5-5", client=started[-1].client())
        Agent("sees", model=model, instructions="Look.", tools=[fetch])
        return started[-1]

    yield declare
    for fake in started:
        fake.stop()


@pytest.mark.parametrize("kind", [kind for kind in UNFIT if kind != "an animation"])
def test_an_input_is_refused_before_anything_is_stored(kind: str, claude: Any) -> None:
    fake, (name, _, why) = claude({"text": "hello"}), UNFIT[kind]
    with pytest.raises(ContentError, match=why) as caught:
        run_agent("sees", [Text("look"), block_of(kind)], "s1")
    assert repr(name) in str(caught.value)
    assert (Run.objects.count(), Message.objects.count()) == (0, 0)
    the_run(run_agent("sees", "hello", "s1"))
    rows = Message.objects.count()
    with pytest.raises(ContentError, match=why):
        send_message("s1", [block_of(kind)])
    assert (Message.objects.count(), len(fake.calls)) == (rows, 1)


@pytest.mark.parametrize("kind", UNFIT)
def test_a_result_keeps_its_rest_and_the_session_goes_on(kind: str, claude: Any) -> None:
    fake = claude({"tools": [call("fetch", kind=kind)]}, {"text": "seen"}, {"text": "still here"})
    run = the_run(run_agent("sees", "look", "s1"))
    assert run_agent("sees", "and now?", "s1").output == "still here"
    assert [(one.status, one.error) for one in fake.calls] == [(200, "")] * 3
    row, (name, _, why) = row_of(run, "tool_result"), UNFIT[kind]
    assert (row.payload["outcome"], row.payload["is_error"]) == ("ok", False)
    stored = [block.get("name") for block in row.payload["content"]]
    is_kept = kind in LIMITED or kind == "an animation"  # Claude sees its first frame
    assert stored == [None, name if is_kept else None, "good.png", None]
    first, bad, good, last = fake.calls[-1].body["messages"][2]["content"][0]["content"]
    assert (first["text"], good["type"], last["text"]) == ("before", "image", "after")
    if kind == "an animation":
        assert bad["type"] == "image"
    else:
        assert why in bad["text"] and name in bad["text"] and "left out" in bad["text"]
