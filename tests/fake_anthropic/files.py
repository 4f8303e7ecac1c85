"""Rules for pictures and documents in a request, checked apart from the package that sends them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tests.fake_anthropic import shape
from tests.fake_anthropic.errors import Refused

MOST = 5 * 2**20  # characters of base64 of a picture
BEGIN = {
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
OPTIONAL = {"image": ["cache_control"], "document": ["cache_control", "citations", "context", "title"]}
SOURCES = {"image": ["base64", "file", "url"], "document": ["base64", "content", "file", "text", "url"]}


def check_file(block: dict[str, Any], where: str) -> None:
    """Raise Refused for a picture or a document that the API would not take."""
    kind = block["type"]
    at = f"{where}.{kind}"
    shape.fields(block, at, ["type", "source"], OPTIONAL[kind])
    tag = shape.tagged(block["source"], f"{at}.source", SOURCES[kind])
    if "title" in block:
        shape.of(str, block["title"], f"{at}.title")
        if not 1 <= len(block["title"]) <= 500:
            raise Refused(f"{at}.title: String should have between 1 and 500 characters")
    if tag not in ("base64", "text"):
        return
    source, at = block["source"], f"{at}.source.{tag}"
    shape.fields(source, at, ["type", "media_type", "data"], [])
    shape.of(str, source["data"], f"{at}.data")
    allowed = ["text/plain"] if tag == "text" else [*BEGIN] if kind == "image" else ["application/pdf"]
    shape.one_of(source["media_type"], f"{at}.media_type", allowed)
    if tag == "text":
        return
    try:
        data = base64.b64decode(source["data"], validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"{at}.data: Invalid base64 data") from None
    if kind == "document" and not data.startswith(b"%PDF-"):
        raise Refused(f"{at}.data: The PDF specified was not valid.")
    if kind == "image" and not data.startswith(BEGIN[source["media_type"]]):
        raise Refused(f"{at}.data: The image does not match the provided media type {source['media_type']}")
    if kind == "image" and len(source["data"]) > MOST:
        size = len(source["data"])
        raise Refused(f"{at}: image exceeds 5 MB maximum: {size} bytes > {MOST} bytes")
