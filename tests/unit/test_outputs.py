"""A last reply as a value of the agent's output_type, and what the model is told where it is none."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from agentruns.agents.output import MAX_PROBLEM, problem_with, schema_of, value_of


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    order: str
    cents: int = Field(gt=0)


class Touchy(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def odd(cls, name: str) -> str:
        if name == "odd":
            raise KeyError("no such name")
        if name == "deep":
            raise RecursionError
        return name


class Fickle(BaseModel):
    """Fits at first and never again."""

    name: str
    seen: list[str] = []

    @field_validator("name")
    @classmethod
    def once(cls, name: str) -> str:
        if name in seen:
            raise LookupError(name)
        seen.append(name)
        return name


seen: list[str] = []


def test_a_text_that_fits_is_a_value() -> None:
    text = '{"order": "A1", "cents": 5}'
    assert problem_with(Answer, text) == ""
    assert value_of(Answer, text) == Answer(order="A1", cents=5)
    assert value_of(RootModel[list[int]], "[1, 2]").root == [1, 2]


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
    ],
)
def test_one_that_does_not_fit_says_what_is_wrong(text: str, words: str) -> None:
    assert words in problem_with(Answer, text)
    assert value_of(Answer, text) == text


def test_a_text_that_is_no_unicode_fits_nothing() -> None:
    assert problem_with(Answer, "\ud800") != ""
    assert value_of(Answer, "\ud800") == "\ud800"


def test_the_problem_is_of_a_length_that_can_be_sent() -> None:
    assert len(problem_with(RootModel[list[int]], str([f"x{n}" for n in range(1000)]).replace("'", '"'))) == (
        MAX_PROBLEM
    )


@pytest.mark.parametrize(("name", "words"), [("odd", "KeyError: 'no such name'"), ("deep", "RecursionError")])
def test_a_validator_may_raise_anything(name: str, words: str) -> None:
    text = f'{{"name": "{name}"}}'
    assert words in problem_with(Touchy, text)
    assert value_of(Touchy, text) == text


def test_a_validator_that_changes_its_mind_leaves_the_text() -> None:
    text = '{"name": "x"}'
    assert problem_with(Fickle, text) == ""
    assert value_of(Fickle, text) == text


def test_without_a_type_the_text_is_the_output() -> None:
    assert (schema_of(None), problem_with(None, "x"), value_of(None, "x")) == (None, "", "x")
    assert value_of(Answer, None) is None


def test_the_schema_is_of_what_is_read() -> None:
    schema: Any = schema_of(Answer)
    assert (schema["required"], schema["additionalProperties"]) == (["order", "cents"], False)
