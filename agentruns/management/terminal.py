"""Text for a terminal, escaped so that no text of a model or a tool moves the cursor or reverses other text.

AGENTRUNS_REDACT redacts texts before they are shortened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from agentruns.utils import characters
from agentruns.utils import json as canonical
from agentruns.utils.redaction import redact, redacted


def escaped(text: object, encoding: str | None = None) -> str:
    """Redact `text`, and replace line breaks and characters without a glyph of their own by escapes.

    With an `encoding`, replace also the characters that the encoding lacks.
    """
    shown = characters.escaped(redact(str(text))).replace("\n", "\\n").replace("\t", "\\t")
    return shown.encode(encoding, "backslashreplace").decode(encoding) if encoding else shown


def shortened(text: object, limit: int = 100) -> str:
    """Redact `text`, join its lines and cut it at `limit` characters."""
    line = " ".join(redact(str(text))[: limit * 4].split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Format a call for people, such as `refund(amount_cents=2490, order_number="1002")`."""
    parts = (
        f"{key}={shortened(json.dumps(redacted(value), ensure_ascii=False), 40)}"
        for key, value in arguments.items()
    )
    return f"{name}({', '.join(parts)})"


def table(rows: Iterable[Iterable[object]]) -> Iterable[str]:
    """Format rows as lines with aligned columns; the first row is the heading."""
    texts = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for cells in texts:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def moment(value: datetime | None) -> str:
    """Format a time in UTC, to the second; "" for None."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if value else ""


def as_json(value: Any) -> str:
    """Encode `value` as one line of legal JSON in ASCII, with times in ISO 8601 UTC and ids as strings."""
    try:
        text = json.dumps(value, cls=_Encoder, allow_nan=False)
    except ValueError:  # for NaN, which JSON lacks
        text = json.dumps(canonical.legal(value), cls=_Encoder)
    return text.replace("\x7f", "\\u007f")


class _Encoder(DjangoJSONEncoder):
    def default(self, o: Any) -> Any:
        return o.astimezone(UTC).isoformat() if isinstance(o, datetime) else super().default(o)
