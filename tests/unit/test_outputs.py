"""A last reply as a value of the agent's output_type, and what the model is told where it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from agentruns.agents.output import MAX_PROBLEM, problem_with, schema_of, value_of


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    order: str
    cents: int = Field(gt=0)


seen: list[str] = []


class Touchy(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def odd(cls, name: str) -> str:
        if name == "odd":
            raise KeyError("no such name")
        if name == "fickle" and name in seen:
            raise LookupError(name)
        seen.append(name)
        if name == "deep":
            raise RecursionError
        return name


def test_a_text_that_fits_is_a_value() -> None:
    text = '{"order": "A1", "cents": 5}'
    assert problem_with(Answer, text) == ""
    assert value_of(Answer, text) == Answer(order="A1", cents=5)
    assert value_of(RootModel[list[int]], "[1, 2]").root == [1, 2]
    assert (schema_of(None), problem_with(None, "x"), value_of(None, "x")) == (None, "", "x")
    assert value_of(Answer, None) is None
    schema: Any = schema_of(Answer)
    assert (schema["required"], schema["additionalProperties"]) == (["order", "cents"], False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the whole: Invalid JSON"),
        ("Here you are: {}", "the whole: Invalid JSON"),
        ('{"order": "A1", "cents": ', "the whole: Invalid JSON"),
        ("[]", "the whole: Input should be an object"),
        ('{"order": "A1"}', "- cents: Field required"),
        ('{"order": 5, "cents": 0}', "- order: Input should be a valid string\n- cents: Input should be gr"),
        ('{"order": "A1", "cents": 5, "why": 1}', "- why: Extra inputs are not permitted"),
        ("[" * 10_000, "the whole"),
        ("\ud800", ""),
    ],
)
def test_one_that_does_not_fit_says_what_is_wrong(text: str, words: str) -> None:
    problem = problem_with(Answer, text)
    assert problem and words in problem
    assert value_of(Answer, text) == text
    many = json.dumps([f"x{n}" for n in range(1000)])
    assert len(problem_with(RootModel[list[int]], many)) == MAX_PROBLEM, "of a length that can be sent"


@pytest.mark.parametrize(
    ("name", "words"), [("odd", "KeyError: 'no such name'"), ("deep", "RecursionError"), ("fickle", "")]
)
def test_a_validator_may_raise_anything_or_change_its_mind(name: str, words: str) -> None:
    text = f'{{"name": "{name}"}}'
    problem = problem_with(Touchy, text)
    assert words in problem and bool(problem) == bool(words)
    assert value_of(Touchy, text) == text
