"""The tool `read_result`, with which a model reads on in a result of which it was sent an excerpt."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentruns.conf import settings
from agentruns.exceptions import ToolRefused
from agentruns.tools.base import declared
from agentruns.tools.context import ToolContext
from agentruns.tools.excerpts import READER, boundary
from agentruns.tools.options import Options

PAGE = 20_000  # characters


def _read(
    ctx: ToolContext,
    result: str,
    offset: Annotated[int, Field(ge=0)] = 0,
    length: Annotated[int, Field(ge=1, le=PAGE)] = PAGE,
) -> str:
    """Read on in the result of an earlier call, if characters of the result were left out.

    Args:
        result: the id of the result, as the note in the result says
        offset: the number of characters to skip
        length: the number of characters to read
    """
    try:
        text = ctx._result(result)
    except LookupError as error:
        raise ToolRefused(str(error)) from None
    if offset >= len(text):
        raise ToolRefused(f"Result {result!r} has {len(text)} characters; offset must be smaller.")
    room = (settings.RESULT_SENT_MAX or PAGE) - 200  # for the line about the page
    last = min(offset + length, offset + room, len(text))
    end = at if (at := boundary(text, last, -1)) > offset else last
    more = f"; go on with offset={end}" if end < len(text) else ""
    return text[offset:end] + f"\n\n[characters {offset} to {end} of {len(text)}{more}]"


read_result = declared(_read, READER, None, Options(safe_to_retry=True), {})
