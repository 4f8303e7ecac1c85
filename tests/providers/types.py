"""An output type with everything that strict schemas forbid."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Bill(BaseModel):
    """One of two kinds of parts."""

    kind: Literal["bill"] = "bill"
    cents: int = 0


class Letter(BaseModel):
    """The other kind."""

    kind: Literal["letter"] = "letter"
    default: str | None = None


class Answer(BaseModel):
    """An answer with defaults, a union and parts."""

    right: bool
    why: str = Field("", description="the reason")
    part: Bill | None = None
    parts: list[Bill | Letter] = []
