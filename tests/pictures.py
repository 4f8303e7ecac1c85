"""Small real files of every type that is taken, and some that are not what they say."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from agentruns import Document, Image, tool
from agentruns.journal.payloads import has_blocks
from agentruns.models import Message


def png(colour: int = 200, side: int = 2, note: bytes = b"") -> bytes:
    """Draw a grey PNG; a `note` in it makes it as long as a test wants."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([colour] * side) for _ in range(side))
    text = chunk(b"tEXt", b"Comment\0" + note) if note else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + text + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PNG = png()
BIG = png(note=b"x" * 100_000)  # more than stays in a row
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQEASABIAAD/2wBDAP//////////////////////////////////////////////2Q=="
)
GIF = base64.b64decode("R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=")
WEBP = base64.b64decode("UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==")
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
NOTE = "Grüße, the handle broke off.\n".encode()
HOSTILE = '"><img src=x onerror=alert(1)>\r\nX-Evil: 1\u202e.png'


@tool
def photograph(big: bool = False) -> Image:
    """Take a photograph."""
    return Image(data=BIG if big else PNG, name="taken.png")


@tool(sensitive_results=["number"])
def scan_passport() -> list[Any]:
    """Scan a passport."""
    return [Image(data=png(7), name="passport.png"), Document(data=b"number 7731-55", name="read.txt")]


def files_of(row: Message) -> list[dict[str, Any]]:
    """Return the blocks of a row that name a file."""
    assert has_blocks(row.payload)
    return [block for block in row.payload["content"] if "sha256" in block]


scanned: list[tuple[str, str, bytes]] = []


def scanner(name: str, media_type: str, data: bytes) -> None:
    """Remember each file, and refuse the test file of virus scanners."""
    scanned.append((name, media_type, data))
    if b"EICAR" in data:
        raise ValueError("a virus")
