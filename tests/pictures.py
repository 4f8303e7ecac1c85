"""Small real files of every type that is taken, and some that are not what they say."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from agentruns import Document, Image, tool
from agentruns.journal.payloads import has_blocks
from agentruns.models import Message


def png(colour: int = 200, side: int = 2, note: bytes = b"", size: tuple[int, int] | None = None) -> bytes:
    """Draw a grey PNG; a `note` in it makes it as long as a test wants. A huge `size` is a lie."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = size if size and max(size) < 10_000 else (side, side)
    rows = b"".join(b"\0" + bytes([colour] * width) for _ in range(height))
    text = chunk(b"tEXt", b"Comment\0" + note) if note else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *(size or (side, side)), 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + text + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PNG = png()
BIG = png(note=b"x" * 100_000)  # more than stays in a row
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAFA3PEY8MlBGQUZaVVBfeMiCeG5uePWvuZHI////////////////////////"
    "////////////////////////////wAALCAACAAMBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAA//EABQQAQAAAAAAAAAA"
    "AAAAAAAAAAD/2gAIAQEAAD8Ad//Z"
)
GIF = base64.b64decode("R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=")
WEBP = base64.b64decode("UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==")
ANIMATED = base64.b64decode(
    "R0lGODlhAgACAIEAAAAAAP///wAAAAAAACH5BAAKAAAALAAAAAACAAIAAAgGAAEIBBAQACH5BAEKAAEALAAAAAACAAIA"
    "gf///wAAAAAAAAAAAAgGAAEIBBAQADs="
)
ANIMATED_WEBP = base64.b64decode(
    "UklGRrQAAABXRUJQVlA4WAoAAAACAAAAAwAAAQAAQU5JTQYAAAAAAAAAAABBTk1GSgAAAAAAAAAAAAMAAAEAAAAAAAJW"
    "UDggMgAAADABAJ0BKgQAAgABQCYloAADcAD+8Por//7B3//pWP/9Kx+yR//9NI//ppH/9NI+U0AAQU5NRjYAAAAAAAAA"
    "AAADAAABAAAAAAAAVlA4IB4AAABUAQCdASoEAAIAAAAmJZwABGGAAP79IUW9XYeQAAA="
)


def pdf(pages: int = 1, locked: bool = False) -> bytes:
    """Write a PDF of empty pages; a `locked` one says that it is encrypted."""
    kids = b" ".join(b"%d 0 R" % (number + 3) for number in range(pages))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]/MediaBox[0 0 9 9]>>" % (pages, kids),
        *[b"<</Type/Page/Parent 2 0 R>>"] * pages,
        b"<</Filter/Standard/V 1/R 2/O<%s>/U<%s>/P -4>>" % (b"00" * 32, b"00" * 32),
    ]
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj%sendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    key = b"/Encrypt %d 0 R/ID[<00><00>]" % len(objects) if locked else b""
    end = b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (size, key, len(data))
    return data + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + end


PDF = pdf()
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


# What a model's provider refuses: the name and bytes of each file, and words of the reason.
UNFIT = {
    "a cut-off PNG": ("cut.png", BIG[:50_000], "ends in the middle of its data"),
    "a cut-off JPEG": ("cut.jpg", JPEG[:-2], "ends in the middle of its data"),
    "a damaged PNG": ("bad.png", PNG.replace(b"IDAT\x78", b"IDAT\x79"), "is damaged"),
    "many pixels": ("wide.png", png(size=(8_001, 1)), "up to 8000 x 8000 pixels"),
    "a bomb": ("bomb.png", png(size=(60_000, 60_000)), "has 60000 x 60000 pixels"),
    "an animation": ("loop.gif", ANIMATED, "no animated GIF"),
    "a locked PDF": ("locked.pdf", pdf(locked=True), "is encrypted"),
    "a broken PDF": ("broken.pdf", b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\n%%EOF\n", "is damaged"),
    "a cut-off PDF": ("cut.pdf", PDF[:-30], "ends in the middle of its data"),
    "many pages": ("book.pdf", pdf(101), "100 pages of PDFs"),
}


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
