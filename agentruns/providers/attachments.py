"""Pictures and documents of a request in the form of the Messages API, and the limits of each provider."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentruns.content import IMAGES, PDF, PLAIN
from agentruns.exceptions import ContentError, ContentTooLargeError, ContentTypeError
from agentruns.files import GIF, begin_of_pdf

# A block of a journal row: type, media_type, name, size, sha256, and what was found in the file.
Meta = dict[str, Any]

NO_LIMIT = 2**31  # none is documented


class Limits(NamedTuple):
    """The files that a provider accepts; sizes in bytes of base64, dimensions in pixels."""

    types: frozenset[str]
    image: int
    request: int  # all files of a request: below the size of a whole one
    files: int  # of one request
    side: int  # width and height of a picture
    pages: int  # of all PDFs of a request
    animated: bool  # whether a GIF may have several frames


# Claude's limits. In a request with more than 20 pictures Claude accepts only small ones, and more than 100
# pages only in a context of a million tokens. Of an animation Claude sees the first frame; not every API of
# OpenAI's form takes one.
DEFAULT = Limits(
    types=frozenset((*IMAGES, PDF, PLAIN)),
    image=5 * 2**20,
    request=28 * 2**20,
    files=20,
    side=8_000,
    pages=100,
    animated=False,
)
_OPENAI = DEFAULT._replace(image=25 * 2**20, request=62 * 2**20, files=100, side=NO_LIMIT, pages=NO_LIMIT)
# By provider; other providers have Claude's limits, within which every API of OpenAI's form works.
LIMITS = {
    "anthropic": DEFAULT._replace(animated=True),
    "openai": _OPENAI,
    "azure": _OPENAI._replace(files=10),
    "ollama": DEFAULT._replace(types=DEFAULT.types - {PDF, "image/gif"}),
    "vllm": DEFAULT._replace(types=DEFAULT.types - {PDF}, animated=True),
}


def limits_of(*identities: str) -> Limits:
    """Compute the limits within which the providers of all given models accept files."""
    # A model of Claude has no provider in its identity.
    providers = ["anthropic" if each.startswith("claude-") else each.partition(":")[0] for each in identities]
    limits = [LIMITS.get(provider, DEFAULT) for provider in providers]
    types = frozenset.intersection(*(each.types for each in limits))
    return Limits(types, *(min(bounds) for bounds in zip(*(each[1:] for each in limits), strict=True)))


@dataclass
class Room:
    """The limits for files in one request, and the number and size of the files counted so far."""

    limits: Limits = DEFAULT
    files: int = 0
    size: int = 0
    pages: int = 0

    def take(self, metas: Iterable[Meta]) -> bool:
        """Count the files and return True if all still fit into the request; otherwise return False."""
        metas = list(metas)
        sizes = [encoded_size(meta["size"]) for meta in metas]
        files, size = self.files + len(sizes), self.size + sum(sizes)
        pages = self.pages + sum(meta.get("pages", 0) for meta in metas)
        if files > self.limits.files or size > self.limits.request or pages > self.limits.pages:
            return False
        self.files, self.size, self.pages = files, size, pages
        return True


def encoded_size(size: int) -> int:
    """Compute the length of `size` bytes in base64."""
    return (size + 2) // 3 * 4


def refusal_of(meta: Meta, limits: Limits = DEFAULT) -> ContentError | None:
    """Build the error for a file that a provider refuses, whatever else is sent; None if it is accepted."""
    name, width, height = meta["name"], meta.get("width", 0), meta.get("height", 0)
    frames, pages = meta.get("frames", 1), meta.get("pages", 0)
    if meta["media_type"] not in limits.types:
        return ContentTypeError(f"The provider takes no {meta['media_type']}: {name!r}.")
    if meta["type"] == "image" and encoded_size(meta["size"]) > limits.image:
        most = limits.image // 4 * 3
        return ContentTooLargeError(f"The provider takes images up to {most} bytes: {name!r}.")
    if max(width, height) > limits.side:
        said = f"The provider takes images up to {limits.side} x {limits.side} pixels"
        return ContentTooLargeError(f"{said}: {name!r} has {width} x {height}. Send a smaller copy.")
    if frames > 1 and meta["media_type"] == GIF and not limits.animated:
        text = f"The provider takes no animated GIF: {name!r} has {frames} frames. Send one of them."
        return ContentTypeError(text)
    if pages > limits.pages:
        text = f"The provider takes {limits.pages} pages of PDFs: {name!r} has {pages}. Send fewer."
        return ContentTooLargeError(text)
    return None


def fitting(metas: Iterable[Meta], limits: Limits = DEFAULT) -> list[Meta]:
    """Select the files, in their order, that fit into one request."""
    room = Room(limits)
    return [meta for meta in metas if refusal_of(meta, limits) is None and room.take([meta])]


def require_taken(metas: list[Meta], limits: Limits = DEFAULT) -> None:
    """Raise ContentTypeError or ContentTooLargeError if a provider would refuse the files, or one of them."""
    for meta in metas:
        if (refusal := refusal_of(meta, limits)) is not None:
            raise refusal
    if not Room(limits).take(metas):
        most, pages = limits.request // 4 * 3, limits.pages
        and_pages = f", and {pages} pages of PDFs" if pages < NO_LIMIT else ""
        raise ContentTooLargeError(
            f"The provider takes {limits.files} files of {most} bytes altogether in a request{and_pages}."
        )


def block_of(meta: Meta, data: bytes) -> dict[str, Any]:
    """Build a request's block from a file; of a PDF, leave out what stands before its header."""
    if meta["media_type"] == PDF:
        data = data[max(0, begin_of_pdf(data)) :]
    source = {"type": "base64", "media_type": meta["media_type"], "data": base64.b64encode(data).decode()}
    if meta["type"] == "image":
        return {"type": "image", "source": source}
    if meta["media_type"] == PLAIN:
        source = {"type": "text", "media_type": PLAIN, "data": data.decode()}
    title = {"title": meta["name"]} if meta["name"].strip() else {}
    return {"type": "document", "source": source, **title}
