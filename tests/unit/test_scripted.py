import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from agentruns.providers.base import ModelReply, ModelRequest, ProviderError, call_model
from agentruns.testing import ScriptedModel, check_messages

TURNS: list[Any] = [
    {"text": "Looking.", "tools": [{"name": "find", "input": {"id": 1}}, {"name": "find"}]},
    {"tools": [{"name": "refund", "input": {}, "id": "toolu_mine"}], "usage": {"input_tokens": 3}},
    {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}], "stop_reason": "pause_turn"},
    {"text": "Done."},
]


def request(step: int = 0, run_id: str = "run-1") -> ModelRequest:
    return ModelRequest("m", "", [{"role": "user", "content": "hi"}], run_id=run_id, step=step)


def test_the_turn_is_the_step_also_in_a_fresh_process() -> None:
    model, there = ScriptedModel(TURNS), pickle.loads(pickle.dumps(ScriptedModel(TURNS)))
    first, second, third, fourth = (model.propose(request(step)) for step in range(4))
    assert [block["type"] for block in first.content] == ["text", "tool_use", "tool_use"]
    assert first.content[1]["input"] == {"id": 1} and first.content[2]["input"] == {}
    assert (first.stop_reason, first.usage) == ("tool_use", {})
    assert second.content == [{"type": "tool_use", "id": "toolu_mine", "name": "refund", "input": {}}]
    assert second.usage == {"input_tokens": 3}
    assert third.content == TURNS[2]["content"] and third.stop_reason == "pause_turn"
    assert fourth == ModelReply([{"type": "text", "text": "Done."}], "end_turn", {}, "scripted")
    third.content[0]["thinking"] = "spoilt"
    first.content[1]["input"]["id"] = 9
    assert model.propose(request(2)).content[0]["thinking"] == "hm", "the script is not changed"
    assert model.propose(request()).content[1]["input"] == {"id": 1}
    for step in (3, 0, 1, 0):
        assert model.propose(request(step)) == there.propose(request(step))


def test_tool_ids_are_unique_within_a_session_and_the_same_when_asked_again() -> None:
    model = ScriptedModel(TURNS * 2)
    ids = [
        block["id"]
        for run in ("run-1", "run-2", "")
        for step in (0, 4)
        for block in model.propose(request(step, run)).content
        if block["type"] == "tool_use"
    ]
    assert len(ids) == len(set(ids)) == 12
    assert ids[-1] == "toolu_4_1"
    assert model.propose(request(0)).content[1]["id"] == ids[0]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for run in ("run-1", "run-2"):
        reply = model.propose(request(0, run))
        messages.append({"role": "assistant", "content": reply.content})
        results = [{"type": "tool_result", "tool_use_id": block["id"]} for block in reply.content[1:]]
        messages.append({"role": "user", "content": results})
    check_messages(messages)


def test_a_turn_may_be_a_function_or_a_reply_and_running_out_of_turns_says_how_many_there_are() -> None:
    raw = {"content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
    reply, cut = ModelReply([], "refusal"), {"text": "cut", "stop_reason": "max_tokens"}
    model = ScriptedModel([raw, {"content": []}, cut, reply, lambda asked: {"text": f"step {asked.step}"}])
    proposed = [model.propose(request(step)) for step in range(5)]
    assert [each.stop_reason for each in proposed[:3]] == ["tool_use", "end_turn", "max_tokens"]
    assert proposed[3] is reply
    assert proposed[4].content == [{"type": "text", "text": "step 4"}]
    with pytest.raises(ProviderError, match=r"has 5 turns and was asked for number 6") as caught:
        model.propose(request(5))
    assert (caught.value.disposition, caught.value.type) == ("fail", "script_exhausted")
    with pytest.raises(ProviderError, match="cut off"):
        call_model(ScriptedModel([{"content": [], "stop_reason": None}]), request())
    with pytest.raises(ValueError, match="Turn 1 is a int"):
        ScriptedModel([lambda asked: 3]).propose(request())


@pytest.mark.parametrize(
    "turn",
    [
        {}, "text", None, {"text": ""}, {"text": " "}, {"text": 3}, {"usage": {}}, {"tool": []},
        {"text": "a", "content": []}, {"tools": {"name": "a"}}, {"tools": ["a"]}, {"tools": [{"input": {}}]},
        {"tools": [{"name": "a", "arguments": {}}]}, {"content": "text"},
    ],
)  # fmt: skip
def test_mistakes_in_a_script_are_found_at_once(turn: Any) -> None:
    with pytest.raises(ValueError, match="Turn 2"):
        ScriptedModel([{"text": "a"}, turn])


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "turns.json"
    for value in (TURNS, {"about": "refunds", "turns": TURNS}):
        path.write_text(json.dumps(value), encoding="utf-8")
        assert ScriptedModel.from_file(path).turns == TURNS
    for wrong in ({}, "x", [{"txt": "a"}]):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(ValueError, match=r"turns\.json"):
            ScriptedModel.from_file(str(path))
