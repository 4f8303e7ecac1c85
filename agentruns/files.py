"""The bytes of pictures and PDFs: their dimensions, frames and pages, and whether anybody can read them.

Headers and trailers are read here. The libraries of the extra `files`, where they are installed, look
further: Pillow decodes pictures, and pypdf opens PDFs.
"""

from __future__ import annotations

import re
import struct
import zlib
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

from agentruns.utils.lanes import Lane

JPEG, PNG, GIF, WEBP, PDF = "image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf"
FORMATS = {JPEG: "JPEG", PNG: "PNG", GIF: "GIF", WEBP: "WEBP"}  # Pillow's names
LIBRARIES = {  # of the extra `files`: what is not looked at without each
    "PIL.Image": "Pillow is missing: pictures are not decoded, so that damage inside one is not found",
    "pypdf": "pypdf is missing: the pages of PDFs are not counted, and damage inside one is not found",
}

MOST_PIXELS = 89_478_485  # Pillow's own limit; a decoded picture takes up to four bytes for each
MOST_PARTS = 1_000_000  # of one file
TAIL = 1_024  # bytes at both ends of a PDF, in which its header and its end are searched
SECONDS = 30  # that the libraries may take for one file, waiting included
THREADS = 2  # of a process that decode, so that memory has a bound

CUT_OFF = "ends in the middle of its data. Send the whole file"
DAMAGED = "is damaged. Save it again with the program that made it"
ENCRYPTED = "is encrypted. Save it without a password"
TOO_LARGE = "has {} x {} pixels, and {} altogether are accepted. Send a smaller copy"
TOO_SLOW = f"could not be examined within {SECONDS} seconds. Send a simpler copy, or try again later"

_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")  # of a JPEG, without those that have no length
_END, _SIZES = 0xD9, {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ENCRYPT = re.compile(rb"/Encrypt\s*(?:\d+\s+\d+\s+R|<<)")
_lane = Lane("agentruns-files", THREADS)

Facts = dict[str, int]  # width and height; frames, if there are several; pages, if they were counted


def examine(media_type: str, data: bytes) -> Facts:
    """Find the dimensions, frames or pages of a picture or PDF; {} for any other type.

    Raises ValueError with a reason that follows the file's name: for a file that is cut off, damaged or
    encrypted, and for a picture of more than MOST_PIXELS. Takes a time linear in the size of the data.
    """
    if media_type not in _READERS:
        return {}
    try:
        facts = _READERS[media_type](data)
    except (IndexError, struct.error):
        raise ValueError(CUT_OFF) from None
    if media_type != PDF:
        width, height = facts["width"], facts["height"]
        if not width * height:
            raise ValueError(DAMAGED)
        if width * height > MOST_PIXELS:
            raise ValueError(TOO_LARGE.format(width, height, MOST_PIXELS))
    is_pdf = media_type == PDF
    if library := _library("pypdf" if is_pdf else "PIL.Image"):
        opened = partial(_count_pages, library) if is_pdf else partial(_decode, library, media_type)
        try:
            facts |= _lane(partial(opened, data), SECONDS)
        except (TimeoutError, RuntimeError):  # too late, or no thread can be started
            raise ValueError(TOO_SLOW) from None
    return facts


def missing() -> list[str]:
    """List what is not looked at, for each library of the extra `files` that is not installed."""
    return [why for name, why in LIBRARIES.items() if _library(name) is None]


def begin_of_pdf(data: bytes) -> int:
    """Find where a PDF begins: viewers skip what stands before its header; -1 if the data is no PDF."""
    begin = data.find(b"%PDF-", 0, TAIL)
    # A text may mention a header; a PDF has an end, too.
    return begin if begin <= 0 or _has_end(data) else -1


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def _decode(pillow: Any, media_type: str, data: bytes) -> Facts:
    """Decode a picture, of an animation the first frame; raises ValueError if that fails."""
    try:
        with pillow.open(BytesIO(data), formats=[FORMATS[media_type]]) as picture:
            picture.draft(None, (1, 1))  # a JPEG in an eighth of its size; no other format has drafts
            picture.load()
    except Exception:
        raise ValueError(DAMAGED) from None
    return {}


def _count_pages(pypdf: Any, data: bytes) -> Facts:
    """Open a PDF and count its pages; raises ValueError if it is encrypted, or if that fails."""
    try:
        reader = pypdf.PdfReader(BytesIO(data))
        is_encrypted, pages = reader.is_encrypted, 0 if reader.is_encrypted else len(reader.pages)
    except Exception:
        raise ValueError(DAMAGED) from None
    if is_encrypted:
        raise ValueError(ENCRYPTED)
    if not pages:
        raise ValueError(DAMAGED)
    return {"pages": pages}


def _read_png(data: bytes) -> Facts:
    size, place, has_pixels = (0, 0), 8, False
    for _ in range(MOST_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        (checksum,) = struct.unpack_from(">I", data, end - 4)
        is_needed = not kind[0] & 0x20
        if is_needed and zlib.crc32(memoryview(data)[place + 4 : end - 4]) != checksum:
            raise ValueError(DAMAGED)
        if kind == b"IHDR":
            size = struct.unpack_from(">II", data, place + 8)
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"IEND" and has_pixels:
            return {"width": size[0], "height": size[1]}
        place = end
    raise ValueError(DAMAGED)


def _read_jpeg(data: bytes) -> Facts:
    width, height, place = 0, 0, 2
    for _ in range(MOST_PARTS):
        # Compressed data, and what viewers skip, has no such marker in it.
        marker = _MARKER.search(data, place)
        if marker is None:
            raise ValueError(CUT_OFF)
        kind, place = marker[1][0], marker.end()
        if kind == _END:
            return {"width": width, "height": height}
        if kind in _SIZES:
            height, width = struct.unpack_from(">HH", data, place + 3)
        place += struct.unpack_from(">H", data, place)[0]
    raise ValueError(DAMAGED)


def _read_gif(data: bytes) -> Facts:
    def colours(flags: int) -> int:
        return 3 * 2 ** (flags % 8 + 1) if flags & 0x80 else 0

    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place, frames = 13 + colours(flags), 0
    for _ in range(MOST_PARTS):
        if frames and (place == len(data) or data[place] == 0x3B):  # viewers need no trailer
            return {"width": width, "height": height, **({"frames": frames} if frames > 1 else {})}
        kind = data[place]
        if kind == 0x2C:
            frames, place = frames + 1, place + 11 + colours(data[place + 9])
        elif kind == 0x21:
            place += 2
        else:
            place += 1  # viewers skip what they do not know
            continue
        while data[place]:
            place += data[place] + 1
        place += 1
    raise ValueError(DAMAGED)


def _read_webp(data: bytes) -> Facts:
    kind, (size,) = data[12:16], struct.unpack_from("<I", data, 4)
    if size + 8 > len(data):
        raise ValueError(CUT_OFF)
    if kind == b"VP8 ":
        width, height = (each & 0x3FFF for each in struct.unpack_from("<HH", data, 26))
        return {"width": width, "height": height}
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return {"width": (bits & 0x3FFF) + 1, "height": (bits >> 14 & 0x3FFF) + 1}
    if kind != b"VP8X":
        raise ValueError(DAMAGED)
    low, high, low_height, high_height = struct.unpack_from("<HBHB", data, 24)
    facts = {"width": (high << 16) + low + 1, "height": (high_height << 16) + low_height + 1}
    frames = data.count(b"ANMF") if data[20] & 0x02 else 1
    return facts | ({"frames": frames} if frames > 1 else {})


def _read_pdf(data: bytes) -> Facts:
    if not _has_end(data):
        raise ValueError(CUT_OFF)
    if _ENCRYPT.search(data):
        raise ValueError(ENCRYPTED)
    return {}


def _has_end(data: bytes) -> bool:
    return b"%%EOF" in data[-4 * TAIL :].rstrip(b"\0 \t\r\n")[-TAIL:]


_READERS = {JPEG: _read_jpeg, PNG: _read_png, GIF: _read_gif, WEBP: _read_webp, PDF: _read_pdf}
