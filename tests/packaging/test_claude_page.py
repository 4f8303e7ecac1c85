"""The page about Claude: its code is run, its figures are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from agentruns.agents import prices
from agentruns.engine.loop import MAX_PAUSE_TURNS
from agentruns.providers import anthropic as provider, window
from agentruns.providers.base import ModelRequest, call_model
from tests.fake_anthropic import FakeAnthropic
from tests.programs import ROOT
from tests.providers.asking import HELLO

PAGE = (ROOT / "docs" / "claude.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """Everything the page defines."""
    from agentruns.signals import text_streamed

    monkeypatch.setattr(text_streamed, "receivers", [])
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-of-the-page")
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    yield names
    text_streamed.sender_receivers_cache.clear()
    for name in ("by_gateway", "on_bedrock", "on_vertex"):
        names[name]._given.close()


def test_the_models_and_the_hook_of_the_page_work_and_its_figures_are_true(
    page: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeAnthropic([{"text": "Hello."}]) as fake:
        for name in ("patient", "uncached", "simple", "strict"):
            page[name]._given = fake.client()
            reply = call_model(page[name], ModelRequest("claude-sonnet-5-5", "Help.", [HELLO]))
            assert reply.content == [{"type": "text", "text": "Hello."}]
    assert capsys.readouterr().out == "Hello." * 4, "the listener of the page"
    messages: list[dict[str, Any]] = [HELLO]
    for number in range(9):
        call = {"type": "tool_use", "id": f"t{number}", "name": "find", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "x"}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    kept = page["keep_five"](messages, 10, 5)
    assert (kept, window.broken_pairs(kept, messages)) == ([HELLO, *messages[-10:]], "")
    assert prices.mistakes(page["AGENTRUNS_PRICES"]) == []
    assert page["research"].model_params["betas"]
    assert f"has {provider.DEFAULT_MAX_TOKENS}" in PAGE
    assert f"{window.SMALLEST:,}".replace(",", " ") in PAGE
    assert MAX_PAUSE_TURNS == 10 and "at most ten times" in PAGE
