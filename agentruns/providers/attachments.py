"""Pictures and documents of a request in the form of the Messages API, and the limits of each provider."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentruns.content import IMAGES, PDF, PLAIN
from agentruns.exceptions import ContentTooLargeError, ContentTypeError

Meta = dict[str, Any]  # a block of a journal row: type, media_type, name, size, sha256


class Limits(NamedTuple):
    """The files that a provider accepts; sizes in bytes of base64."""

    types: frozenset[str]
    image: int
    request: int  # all files of a request: below the size of a whole one
    files: int  # of one request


# Claude's limits. In a request with more than 20 pictures Claude accepts only small ones.
DEFAULT = Limits(
    types=frozenset((*IMAGES, PDF, PLAIN)),
    image=5 * 2**20,
    request=28 * 2**20,
    files=20,
)
# By provider; other providers have Claude's limits, within which every API of OpenAI's form works.
LIMITS = {
    "openai": DEFAULT._replace(image=25 * 2**20, request=62 * 2**20, files=100),
    "azure": DEFAULT._replace(image=25 * 2**20, request=62 * 2**20, files=10),
    "ollama": DEFAULT._replace(types=DEFAULT.types - {PDF, "image/gif"}),
    "vllm": DEFAULT._replace(types=DEFAULT.types - {PDF}),
}


def limits_of(*identities: str) -> Limits:
    """Compute the limits within which the providers of all given models accept files."""
    limits = [LIMITS.get(identity.partition(":")[0], DEFAULT) for identity in identities]
    types = frozenset.intersection(*(each.types for each in limits))
    return Limits(types, *(min(bounds) for bounds in zip(*(each[1:] for each in limits), strict=True)))


@dataclass
class Room:
    """The limits for files in one request, with the number and size of the files counted so far."""

    limits: Limits = DEFAULT
    files: int = 0
    size: int = 0

    def take(self, metas: Iterable[Meta]) -> bool:
        """Count the files and return True if all still fit into the request; otherwise return False."""
        sizes = [encoded_size(meta["size"]) for meta in metas]
        files, size = self.files + len(sizes), self.size + sum(sizes)
        if files > self.limits.files or size > self.limits.request:
            return False
        self.files, self.size = files, size
        return True


def encoded_size(size: int) -> int:
    """Compute the length of `size` bytes in base64."""
    return (size + 2) // 3 * 4


def is_taken(meta: Meta, limits: Limits = DEFAULT) -> bool:
    """Check whether a provider accepts the file by its type and, for an image, by its encoded size.

    Does not check the size of all files in a request.
    """
    is_small = meta["type"] != "image" or encoded_size(meta["size"]) <= limits.image
    return meta["media_type"] in limits.types and is_small


def fitting(metas: Iterable[Meta], limits: Limits = DEFAULT) -> list[Meta]:
    """Select the files, in their order, that fit into one request."""
    room = Room(limits)
    return [meta for meta in metas if is_taken(meta, limits) and room.take([meta])]


def require_taken(metas: list[Meta], limits: Limits = DEFAULT) -> None:
    """Raise ContentTypeError or ContentTooLargeError for files that a provider would refuse."""
    for meta in metas:
        if meta["media_type"] not in limits.types:
            raise ContentTypeError(f"The provider takes no {meta['media_type']}: {meta['name']!r}.")
        if not is_taken(meta, limits):
            most = limits.image // 4 * 3
            raise ContentTooLargeError(f"The provider takes images up to {most} bytes: {meta['name']!r}.")
    if not Room(limits).take(metas):
        most = limits.request // 4 * 3
        raise ContentTooLargeError(
            f"The provider takes {limits.files} files of {most} bytes altogether in a request."
        )


def block_of(meta: Meta, data: bytes) -> dict[str, Any]:
    """Build a request's block from a file."""
    source = {"type": "base64", "media_type": meta["media_type"], "data": base64.b64encode(data).decode()}
    if meta["type"] == "image":
        return {"type": "image", "source": source}
    if meta["media_type"] == "text/plain":
        source = {"type": "text", "media_type": "text/plain", "data": data.decode()}
    title = {"title": meta["name"]} if meta["name"].strip() else {}
    return {"type": "document", "source": source, **title}
