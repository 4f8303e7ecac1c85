"""Blocks of text, pictures and documents: what is taken, and what is refused and why."""

from __future__ import annotations

import base64
import hashlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from django.core.files.base import ContentFile, File
from django.core.files.uploadedfile import SimpleUploadedFile

from agentruns import Document, Image, Text, content
from agentruns.checks.settings import check_values
from agentruns.exceptions import ContentError, ContentTooLargeError, ContentTypeError
from agentruns.providers import attachments
from agentruns.testing import check_messages
from agentruns.testing.script import InvalidMessages
from tests.pictures import GIF, HOSTILE, JPEG, NOTE, PDF, PNG, WEBP, png, scanned
from tests.unit.messages import HELLO, assistant, result, use, user

TAKEN = {
    "image/png": PNG, "image/jpeg": JPEG, "image/gif": GIF, "image/webp": WEBP,
    "application/pdf": PDF, "text/plain": NOTE,
}  # fmt: skip


@pytest.mark.parametrize("media_type", TAKEN)
def test_the_type_is_found_by_content(media_type: str, tmp_path: Path) -> None:
    kind, data = Image if media_type in content.IMAGES else Document, TAKEN[media_type]
    path = tmp_path / "a file"
    path.write_bytes(data)
    upload = SimpleUploadedFile("up", data, content_type=media_type)
    upload.read()  # somebody looked at it before
    for given in (
        {"data": data}, {"data": bytearray(data)}, {"path": path}, {"path": str(path)},
        {"data": BytesIO(data)}, {"data": ContentFile(data)}, {"data": File(BytesIO(data))},
        {"data": upload}, {"data": data, "media_type": f"{media_type.upper()}; charset=utf-8"},
    ):  # fmt: skip
        made = kind(**given)
        assert (made.media_type, made.data) == (media_type, data), given
        check_messages([user(sent(made))])


def sent(block: content.File) -> dict[str, Any]:
    return attachments.block_of(content.packed([block])["content"][0], block.data)


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"data": PNG, "media_type": "image/jpeg"}, ContentError, "its content is image/png"),
        ({"data": b"\x89PNG", "media_type": "image/png"}, ContentError, "no such thing"),
        ({"data": NOTE, "media_type": "image/png"}, ContentError, "its content is text/plain"),
        ({"data": b"<svg/>", "media_type": "image/svg+xml"}, ContentTypeError, "image/svg+xml"),
        ({"data": b"BM\xff\xfe"}, ContentTypeError, "of no known type"),
        ({"data": b""}, ContentTypeError, "of no known type"),
        ({"data": PDF}, ContentTypeError, "application/pdf"),
        ({"data": PNG, "path": "x"}, TypeError, "either"),
        ({}, TypeError, "either"),
        ({"path": "/nowhere.png"}, FileNotFoundError, "nowhere"),
        ({"data": "text"}, TypeError, ""),
    ],
)
def test_what_is_no_picture(given: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error) as caught:
        Image(**given)
    assert why in str(caught.value)
    assert type(caught.value) is error


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\0b", b" \n", PNG, b"\xed\xa0\x80"])
def test_what_is_no_document(data: bytes) -> None:
    with pytest.raises(ContentTypeError):
        Document(data=data)
    with pytest.raises(ContentTypeError, match="text/csv; it may be application/pdf, text/plain"):
        Document(data=b"a,b", media_type="text/csv", name="a.csv")


def test_the_limit_of_a_file(settings: Any, tmp_path: Path) -> None:
    settings.AGENTRUNS_FILE_MAX = len(PNG)
    assert Image(data=PNG).data == PNG
    path = tmp_path / "p.png"
    path.write_bytes(PNG + b"x")
    for given in ({"data": PNG + b"x"}, {"path": path}, {"data": BytesIO(PNG + b"x")}):
        with pytest.raises(ContentTooLargeError, match=f"more than {len(PNG)} bytes"):
            Image(**given)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\x\\mug.png", "mug.png"),
        ("a\r\nb\0.png", "a__b_.png"),
        ("\ud800.png", "_.png"),
        ("x" * 300, "x" * 200),
        (HOSTILE, '"><img src=x onerror=alert(1)>__X-Evil: 1_.png'),
    ],
)
def test_a_name_is_one_line_without_a_folder(name: str, kept: str) -> None:
    assert Image(data=PNG, name=name).name == kept


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "neither"), (None, "neither"), (b"bytes", "neither"), ({"type": "text"}, "neither"),
        ([{"type": "text", "text": "x"}], "Block 0 is a dict"), ([Text("x"), "y"], "Block 1 is a str"),
        ([Text(" \n")], "Block 0 is an empty text"), ([Text("x")] * 101, "has 101 blocks"),
    ],
)  # fmt: skip
def test_what_is_no_input(given: Any, why: str) -> None:
    with pytest.raises(ContentError, match=why):
        content.checked(given)
    with pytest.raises(TypeError):
        Text(b"x")  # type: ignore[arg-type]


def test_their_json_form_has_each_file_once() -> None:
    picture = Image(data=PNG, name="mug.png")
    made = content.packed([Text("see"), picture, Image(data=PNG, name="again.png"), Document(data=PDF)])
    digest = hashlib.sha256(PNG).hexdigest()
    assert made["content"][:2] == [
        {"type": "text", "text": "see"},
        {"type": "image", "media_type": "image/png", "name": "mug.png", "size": len(PNG), "sha256": digest},
    ]
    assert [file["size"] for file in made["stored"]] == [len(PNG), len(PDF)]
    assert base64.b64decode(made["stored"][0]["data"]) == PNG
    text = content.described(made["content"])
    assert text.startswith(f"see\n[image mug.png: image/png, {len(PNG)} bytes, ")
    assert digest not in text, "by its plain digest a small file could be guessed"
    assert text == content.described(made["content"])
    assert text != content.described(content.packed([Text("see"), Image(data=png(1))])["content"])


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ([Image(data=png(note=b"x" * 4_000_000))], "images up to 3932160 bytes"),
        ([Image(data=png(n)) for n in range(21)], "20 files of"),
        ([Document(data=b"%PDF-" + bytes(19_000_000))] * 2, "22020096 bytes altogether"),
    ],
)
def test_what_the_provider_would_refuse_is_refused_before(blocks: Any, error: str) -> None:
    with pytest.raises(ContentTooLargeError, match=error):
        attachments.require_taken(content.packed(blocks)["content"])


def test_a_scanner_sees_each_file_before_it_is_taken(settings: Any) -> None:
    settings.AGENTRUNS_SCANNER = "tests.pictures.scanner"
    scanned.clear()
    content.checked([Text("x"), Image(data=PNG, name="a.png"), Document(data=NOTE)])
    assert scanned == [("a.png", "image/png", PNG), ("", "text/plain", NOTE)]
    with pytest.raises(ContentError, match=r"The document 'bad.txt' was refused: a virus"):
        content.checked([Document(data=b"EICAR", name="bad.txt")])
    kept = content.admitted([Text("x"), Document(data=b"EICAR", name="bad.txt"), Image(data=PNG)])
    assert [type(block) for block in kept] == [Text, Text, Image]
    assert "was refused: a virus" in str(kept[1])


PICTURE = sent(Image(data=PNG))
PAPER = sent(Document(data=PDF, name="a.pdf"))
WORDS = sent(Document(data=NOTE))


def source(block: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**block, "source": {**block["source"], **changes}}


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({"type": "image"}, "needs a source"),
        ({"type": "image", "source": "x"}, "needs a source"),
        (source(PICTURE, media_type="image/jpeg"), "the data is image/png, not image/jpeg"),
        (source(PICTURE, media_type="image/svg+xml"), "image of media type"),
        (source(PAPER, media_type="image/png"), "document of media type"),
        (source(PICTURE, data="not base64!"), "no base64"),
        (source(PICTURE, data=PICTURE["source"]["data"][:-2]), "no base64"),
        (source(PICTURE, data=""), "a string"),
        (source(PICTURE, data=None), "a string"),
        (source(WORDS, media_type="text/html"), "source of a document"),
        ({**WORDS, "type": "image"}, "source of a document"),
        (sent(Image(data=png(note=b"x" * 4_000_000))), "5242880 are allowed"),
    ],
)
def test_files_that_the_provider_refuses(block: Any, why: str) -> None:
    for messages in ([user(block)], [HELLO, assistant(use()), user(result(content=[block]))]):
        with pytest.raises(InvalidMessages, match=why):
            check_messages(messages)


@pytest.mark.parametrize("block", [PICTURE, PAPER, WORDS])
def test_where_files_may_be(block: Any) -> None:
    check_messages([HELLO, assistant(use()), user(result(content=[block]), block)])
    with pytest.raises(InvalidMessages, match="belongs in a user message"):
        check_messages([HELLO, assistant(block)])
    with pytest.raises(InvalidMessages, match="an error may hold text only"):
        check_messages([HELLO, assistant(use()), user(result(content=[block], is_error=True))])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"SCANNER": "tests.pictures.scanner", "FILE_MAX": 1}, ""),
        ({"SCANNER": "shop.nowhere.scan"}, "No module named"),
        ({"SCANNER": "tests.pictures.scanned"}, "cannot be called"),
        ({"FILE_MAX": 0}, "not a number of bytes"),
        ({"FILE_MAX": "20 MB"}, "not a number of bytes"),
    ],
)
def test_the_settings_are_checked(names: dict[str, Any], why: str, settings: Any) -> None:
    for name, value in names.items():
        setattr(settings, f"AGENTRUNS_{name}", value)
    found = check_values(None)
    assert [each.id for each in found] == (["agentruns.E020"] if why else [])
    assert all(why in each.msg for each in found)
