"""Blocks of a task, a message or a result: texts, pictures and documents, checked and in their JSON form.

The JSON form becomes part of a row's payload: `content` has the blocks, and `stored` has their files. A block
names its file by SHA-256. `described` builds a text for people, which also serves to compare inputs.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from django.utils.crypto import salted_hmac

from agentruns import files
from agentruns.conf import settings
from agentruns.exceptions import ContentError, ContentTooLargeError, ContentTypeError
from agentruns.utils.bounds import NAME_LENGTH

MOST_BLOCKS = 100  # of one input
AS_TEXT, AS_BLOCKS = "as a text", "as blocks"  # the forms of an input
PDF, PLAIN = files.PDF, "text/plain"
IMAGES = {
    files.JPEG: re.compile(rb"\xff\xd8\xff"),
    files.PNG: re.compile(rb"\x89PNG\r\n\x1a\n"),
    files.GIF: re.compile(rb"GIF8[79]a"),
    files.WEBP: re.compile(rb"RIFF....WEBP", re.DOTALL),
}
# Other names of types that browsers, phones and servers use.
ALIASES = {
    "image/jpg": files.JPEG,
    "image/pjpeg": files.JPEG,
    "image/x-png": files.PNG,
    "application/x-pdf": PDF,
}
EXTENSIONS = {
    files.JPEG: (".jpg", ".jpeg"),
    files.PNG: (".png",),
    files.GIF: (".gif",),
    files.WEBP: (".webp",),
    PDF: (".pdf",),
    PLAIN: (".txt",),
}
# Marks at the beginning of a text; UTF-32 first, because its mark begins with that of UTF-16.
MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"\xef\xbb\xbf": "utf-8-sig",
}
# Names of encodings of text; Python has others, whose decoders are slow or decode no text.
CHARSET = re.compile(r"(?:utf|iso|windows|cp|latin|us-ascii|koi8|mac|shift|euc|big5|gb)[\w.:-]*", re.ASCII)

Packed = dict[str, Any]  # members of a row's payload


@dataclass(frozen=True, slots=True)
class Text:
    """A text among other blocks."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Text takes a string, not {type(self.text).__name__}.")


class File:
    """A file among the blocks, from a `path`, or from `data`: bytes or a Django file such as an upload.

    The content decides the type; `media_type` is only compared with it. A text in another encoding becomes
    UTF-8 if a mark in it, or the charset of `media_type`, names the encoding. Raises TypeError unless one of
    `path` and `data` is given, ContentTypeError for a type that is not allowed, ContentError if the declared
    type is not that of the content, and ContentTooLargeError above AGENTRUNS_FILE_MAX.
    """

    kind: ClassVar[str]
    types: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        data: Any = None,
        media_type: str | None = None,
        name: str = "",
    ) -> None:
        if (path is None) == (data is None):
            raise TypeError(f"{type(self).__name__} takes either path= or data=.")
        most, charset = settings.FILE_MAX, getattr(data, "charset", None)
        if path is not None:
            with Path(path).open("rb") as file:
                data, name = file.read(most + 1), name or os.path.basename(path)
        elif hasattr(data, "read"):
            if data.seekable():
                data.seek(0)
            name = name or str(getattr(data, "name", None) or "")
            media_type = media_type or getattr(data, "content_type", None)
            data = data.read(most + 1)
        self.facts: files.Facts = {}  # once it is examined
        self.data = bytes(data)
        if PLAIN in self.types and len(self.data) <= most and type_of(self.data) != PDF:
            named = re.search(r";\s*charset=[\"']?([\w.:-]+)", media_type or "", re.IGNORECASE)
            charset = (named[1] if named else charset or "").lower()
            marked = [encoding for mark, encoding in MARKS.items() if self.data.startswith(mark)]
            if CHARSET.fullmatch(charset := next(iter(marked), charset)):
                with suppress(UnicodeError, LookupError):  # of another encoding: it stays as it is
                    self.data = self.data.decode(charset).encode()
        last = re.split(r"[/\\]", name)[-1][:NAME_LENGTH]
        self.name = "".join(each if each.isprintable() else "_" for each in last)
        label = f"The {self.kind} {self.name!r}"
        if len(self.data) > most:
            raise ContentTooLargeError(f"{label} has more than {most} bytes (AGENTRUNS_FILE_MAX).")
        self.media_type = found = type_of(self.data)
        declared = type_named(media_type or found)
        if declared not in self.types:
            raise ContentTypeError(
                f"{label} is {declared or 'of no known type'}; it may be {', '.join(self.types)}."
            )
        if declared == PLAIN and not found and self.data.strip():
            raise ContentError(
                f"{label} is no text in UTF-8. Save it as UTF-8, or name its encoding: "
                "text/plain; charset=windows-1252."
            )
        if declared != found:
            raise ContentError(f"{label} says it is {declared}; its content is {found or 'no such thing'}.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.media_type} {len(self.data)} bytes>"

    def examine(self) -> None:
        """Scan the file, if the project has a scanner, and find its dimensions, frames or pages.

        Raises ContentError for a file that the scanner refuses or fails on, or that no model can read.
        """
        label = f"The {self.kind} {self.name!r}"
        if settings.SCANNER is not None:
            try:
                settings.scanner(self.name, self.media_type, self.data)
            except Exception as error:
                raise ContentError(f"{label} was refused: {error}") from error
        try:
            self.facts = files.examine(self.media_type, self.data)
        except ValueError as error:
            raise ContentError(f"{label} {error}.") from None


class Image(File):
    """A picture: JPEG, PNG, GIF or WebP."""

    kind, types = "image", tuple(IMAGES)


class Document(File):
    """A PDF, or a text in UTF-8."""

    kind, types = "document", (PDF, PLAIN)


def of_upload(file: Any) -> File:
    """Build an Image from an upload that is declared as an image, else a Document; raises as File does."""
    is_picture = type_named(file.content_type or "").startswith("image/")
    return (Image if is_picture else Document)(data=file)


Block = Text | File
Input = str | Block | Sequence[Block]
FILES: dict[str, type[File]] = {kind.kind: kind for kind in (Image, Document)}


def type_named(media_type: str) -> str:
    """Convert a name of a media type to the usual one, without its parameters."""
    name = media_type.partition(";")[0].strip().lower()
    return ALIASES.get(name, name)


def download_name(name: str, media_type: str) -> str:
    """Build a name whose extension says what the file is, whatever the given name says."""
    endings = EXTENSIONS.get(media_type, (".bin",))
    return name if name.lower().endswith(endings) else name + endings[0]


def type_of(data: bytes) -> str:
    """Find the media type of an image, a PDF, or a text in UTF-8 that is not blank; "" for anything else."""
    if found := next((media_type for media_type, magic in IMAGES.items() if magic.match(data)), ""):
        return found
    if files.begin_of_pdf(data) >= 0:
        return PDF
    try:
        return PLAIN if data.decode().strip() and b"\0" not in data else ""
    except UnicodeDecodeError:
        return ""


def checked(given: Any) -> list[Block]:
    """Check an input that is no string, and list its blocks. Scans the files.

    Raises ContentError for anything but 1 to MOST_BLOCKS blocks, for a blank text, and for a refused file.
    """
    blocks = [given] if isinstance(given, Text | File) else given
    if not isinstance(blocks, list | tuple) or not blocks:
        raise ContentError("The input is neither a text nor a list of Text, Image and Document blocks.")
    if len(blocks) > MOST_BLOCKS:
        raise ContentError(f"The input has {len(blocks)} blocks; it may have {MOST_BLOCKS}.")
    for number, block in enumerate(blocks):
        if not isinstance(block, Text | File):
            raise ContentError(f"Block {number} is a {type(block).__name__}, no Text, Image or Document.")
        if isinstance(block, Text) and not block.text.strip():
            raise ContentError(f"Block {number} is an empty text.")
        if isinstance(block, File):
            block.examine()
    return list(blocks)


def is_block(value: Any) -> bool:
    """Check whether a result is a block or a list with at least one block."""
    items = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, Text | File) for one in items)


def admitted(blocks: Iterable[Block]) -> list[Block]:
    """List the blocks of a result without empty texts; never raises.

    A text with the reason replaces a file that is refused, or that no model can read.
    """
    kept: list[Block] = []
    for block in blocks:
        try:
            if isinstance(block, File):
                block.examine()
            if not isinstance(block, Text) or block.text.strip():
                kept.append(block)
        except ContentError as error:
            kept.append(Text(f"{error} The file is left out of this result."))
    return kept


def packed(blocks: Iterable[Block]) -> Packed:
    """Convert blocks to their JSON form: `content` has the blocks, `stored` has each file once, in base64."""
    content: list[dict[str, Any]] = []
    stored: dict[str, dict[str, Any]] = {}
    for block in blocks:
        if isinstance(block, Text):
            content.append({"type": "text", "text": block.text})
            continue
        digest, size = hashlib.sha256(block.data).hexdigest(), len(block.data)
        about = {"media_type": block.media_type, "name": block.name, "size": size, "sha256": digest}
        content.append({"type": block.kind, **about, **block.facts})
        data = base64.b64encode(block.data).decode()
        stored[digest] = {"sha256": digest, "size": size, "form": "bytes", "data": data}
    return {"content": content, "stored": [*stored.values()]}


def described(content: list[dict[str, Any]], key: str | bytes | None = None) -> str:
    """Describe blocks in one text for people: their texts, and a placeholder for each file."""
    # The digests are keyed, by default with the project's SECRET_KEY, so that nobody can guess a file.

    def text(block: dict[str, Any]) -> str:
        if block.get("type") == "text":
            return str(block.get("text", ""))
        digest = salted_hmac("agentruns.file", str(block.get("sha256")), key, algorithm="sha256")
        return placeholder(block, digest.hexdigest()[:32])

    return "\n".join(map(text, content))


def placeholder(block: dict[str, Any], digest: str) -> str:
    """Build the text that stands for a file: its type, name, media type, size and `digest`."""
    names = (str(block.get(name, "?")) for name in ("type", "name", "media_type", "size"))
    return "[{} {}: {}, {} bytes, {}]".format(*names, digest)
