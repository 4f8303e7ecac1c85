"""What is found in the bytes of pictures, PDFs and texts, with the libraries of the extra and without."""

from __future__ import annotations

import base64
import sys
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from agentruns import Document, Image, content, files
from agentruns.checks.deployment import check_files
from agentruns.exceptions import ContentError, ContentTooLargeError, ContentTypeError
from agentruns.providers import attachments
from agentruns.tools.mcp.client import result_of
from tests.pictures import ANIMATED, ANIMATED_WEBP, BIG, GIF, JPEG, NOTE, PDF, PNG, UNFIT, WEBP, pdf, png
from tests.shop.agents import shop_agent

WITHOUT_LIBRARIES = {
    "a damaged PNG",
    "a cut-off PNG",
    "a cut-off JPEG",
    "a bomb",
    "a locked PDF",
    "a cut-off PDF",
}


@pytest.fixture(params=["with", "without"])
def extra(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The extra `files`, installed or not."""
    if request.param == "without":
        for name in files.LIBRARIES:
            monkeypatch.setitem(sys.modules, name, None)
    return bool(request.param == "with")


def made(data: bytes, name: str = "") -> content.File:
    return (Image if content.type_of(data) in content.IMAGES else Document)(data=data, name=name)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (PNG, {"width": 2, "height": 2}),
        (JPEG, {"width": 3, "height": 2}),
        (JPEG + b"\0 a film of a telephone", {"width": 3, "height": 2}),
        (GIF, {"width": 1, "height": 1}),
        (GIF[:-1], {"width": 1, "height": 1}),
        (ANIMATED, {"width": 2, "height": 2, "frames": 2}),
        (WEBP, {"width": 1, "height": 1}),
        (ANIMATED_WEBP, {"width": 4, "height": 2, "frames": 2}),
        (pdf(3), {"pages": 3}),
        (b"\r\n" + PDF + bytes(2_000), {"pages": 1}),
        (NOTE, {}),
    ],
)
def test_dimensions_frames_and_pages(data: bytes, facts: dict[str, int], extra: bool) -> None:
    block = made(data)
    block.examine()
    assert block.facts == ({} if "pages" in facts and not extra else facts)
    assert content.packed([block])["content"][0].items() >= block.facts.items()


@pytest.mark.parametrize("kind", UNFIT)
def test_what_no_model_can_read_is_refused_with_the_reason(kind: str, extra: bool) -> None:
    name, data, why = UNFIT[kind]
    block = made(data, name)
    if not extra and kind not in WITHOUT_LIBRARIES:
        block.examine()  # only the libraries know, or only the provider's limits
        return
    try:
        block.examine()
    except ContentError as error:
        assert why in str(error) and repr(name) in str(error)
        return
    with pytest.raises((ContentTooLargeError, ContentTypeError), match=why) as caught:
        attachments.require_taken([content.packed([block])["content"][0]])
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("data", [PNG, JPEG, GIF, ANIMATED, WEBP, ANIMATED_WEBP, PDF])
def test_no_cut_off_file_raises_anything_else(data: bytes, extra: bool) -> None:
    for size in range(12, len(data)):
        if content.type_of(data[:size]):
            try:
                files.examine(content.type_of(data), data[:size])
            except ValueError as error:
                assert str(error).startswith(("ends in", "is damaged"))


def test_the_strictest_limits_of_all_models_count() -> None:
    wide = {"type": "image", "media_type": files.PNG, "name": "a", "size": 9, "width": 9_000, "height": 1}
    loop = {"type": "image", "media_type": files.GIF, "name": "a", "size": 9, "frames": 2}
    book = {"type": "document", "media_type": files.PDF, "name": "a", "size": 9, "pages": 60}
    claude, gpt = "claude-sonnet-5-5", "openai:gpt-5.4"
    for meta, models, is_taken in (
        (wide, (gpt,), True), (wide, (claude,), False), (wide, (gpt, claude), False),
        (loop, (claude,), True), (loop, (gpt,), False), (loop, (claude, gpt), False),
    ):  # fmt: skip
        assert (attachments.fitting([meta], attachments.limits_of(*models)) == [meta]) is is_taken
    assert attachments.fitting([book, book], attachments.limits_of(gpt)) == [book, book]
    assert attachments.fitting([book, book], attachments.limits_of(gpt, claude)) == [book]
    with pytest.raises(ContentTooLargeError, match="100 pages"):
        attachments.require_taken([book, book], attachments.limits_of(claude))


@pytest.mark.parametrize("name", ["image/jpg", "image/pjpeg", "IMAGE/JPG; q=1"])
def test_names_of_types_that_are_in_use(name: str) -> None:
    assert Image(data=JPEG, media_type=name).media_type == "image/jpeg"
    assert content.of_upload(SimpleUploadedFile("a.jpg", JPEG, name)).media_type == "image/jpeg"
    with pytest.raises(ContentError, match="its content is image/png"):
        Image(data=PNG, media_type=name)


def test_the_extension_of_a_download_is_that_of_the_type() -> None:
    for name, media_type, saved in (
        ("a.png", files.PNG, "a.png"), ("a.JPG", files.JPEG, "a.JPG"), ("a.jpeg", files.JPEG, "a.jpeg"),
        ("bill.exe", files.PNG, "bill.exe.png"), ("a.html", "text/plain", "a.html.txt"),
        ("a", files.PDF, "a.pdf"), ("a.png", "text/html", "a.png.bin"),
    ):  # fmt: skip
        assert content.download_name(name, media_type) == saved


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "windows-1252"])
def test_a_text_becomes_utf_8_if_its_encoding_is_known(encoding: str) -> None:
    data, named = "Grüße".encode(encoding), f"text/plain; charset={encoding}"
    assert Document(data=data, media_type=named).data.decode() == "Grüße"
    upload = SimpleUploadedFile("a.txt", data, "text/plain")
    upload.charset = encoding
    assert Document(data=upload).data.decode() == "Grüße"
    if encoding != "windows-1252":
        assert Document(data=data).data.decode() == "Grüße"
        return
    for charset in ("", "; charset=punycode", "; charset=nobody", "; charset=utf-8"):
        with pytest.raises(ContentError, match="no text in UTF-8"):
            Document(data=data, media_type=f"text/plain{charset}", name="a.txt")


def test_a_text_about_pdf_stays_a_text_and_a_late_header_is_sent_first() -> None:
    assert content.type_of(b"A file begins with %PDF-1.7.") == "text/plain"
    meta = content.packed([Document(data=b"HTTP/1.1\r\n\r\n" + PDF)])["content"][0]
    source = attachments.block_of(meta, b"HTTP/1.1\r\n\r\n" + PDF)["source"]
    assert source == attachments.block_of(meta, PDF)["source"]


def test_no_file_takes_the_libraries_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(files, "_lane", late)
    with pytest.raises(ContentError, match="could not be examined within"):
        Image(data=PNG).examine()


def test_a_deployment_hears_what_is_not_looked_at(extra: bool) -> None:
    shop_agent("looks")
    found = check_files(None)
    assert (
        [(each.id, "agentruns[files]" in each.hint) for each in found] == []
        if extra
        else [("agentruns.I001", True)] * 2
    )


def test_a_big_picture_is_one_that_is_taken() -> None:
    for data in (BIG, png(size=(8_000, 1))):
        block = made(data)
        block.examine()
        attachments.require_taken([content.packed([block])["content"][0]])


def test_a_picture_of_an_mcp_server_may_have_an_odd_type_and_a_broken_one_leaves_the_rest() -> None:
    from mcp.types import CallToolResult, ImageContent, TextContent

    def picture(data: bytes, name: str) -> ImageContent:
        return ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=name)

    text = TextContent(type="text", text="two of three")
    items = [picture(JPEG, "image/jpg"), text, picture(JPEG, "image/pjpeg"), picture(BIG[:-99], "image/png")]
    made = content.admitted(result_of(CallToolResult(content=items)))
    assert [getattr(block, "media_type", "text") for block in made] == [
        "image/jpeg",
        "text",
        "image/jpeg",
        "text",
    ]
    assert isinstance(made[3], content.Text)
    assert "ends in the middle" in made[3].text and "left out" in made[3].text
