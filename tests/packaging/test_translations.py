"""Texts that people read go through gettext; `make check` collects them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.template.base import Lexer, TokenType
from django.utils.translation import override, trans_real

from agentruns.contrib.mail import MailNotifier
from agentruns.journal.outbox import Notice
from agentruns.models import Approval, Run
from agentruns.utils.ids import uuid7
from tests.packaging.translations import PACKAGE, called, sources, templates

SENTENCE = re.compile(r"[A-Z][a-z]*,? [a-z]+")


def test_templates_have_no_words_of_their_own() -> None:
    """But for a command, which is the same in every language, and what is no word: SHA-256."""
    for path, source in templates():
        words = re.sub(r"<code>manage\.py [^<]*</code>|SHA-256", "", outside_of_tags(source))
        attributes = re.findall(r'\b(?:title|aria-label|placeholder|alt)="([^"]*)"', words)
        said = [*attributes, *re.sub(r"<[^>]*>", "\n", words).split("\n")]
        assert not [text for text in said if re.search(r"[A-Za-z]{2}", text)], path


def outside_of_tags(source: str) -> str:
    """Read a template's text without its tags, variables, comments, and what it translates."""
    kept, is_translated = [], False
    for token in Lexer(source).tokenize():
        if token.token_type == TokenType.BLOCK:
            name = token.contents.split()[0]
            is_translated = name != "endblocktranslate" and (is_translated or name == "blocktranslate")
        elif token.token_type == TokenType.TEXT and not is_translated:
            kept.append(token.contents)
    return "".join(kept)


def test_the_console_says_no_sentence_that_is_not_translated() -> None:
    for path in sorted((PACKAGE / "admin").rglob("*.py")):
        tree = ast.parse(path.read_text())
        exempt = {id(part) for call, _texts in called(tree) for part in ast.walk(call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                exempt.add(id(node.value))  # a docstring
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                exempt |= {id(part) for part in node.args}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in exempt:
                assert not SENTENCE.match(node.value), f"{path.name}:{node.lineno}: {node.value}"


def test_nothing_is_translated_once_for_everybody() -> None:
    """What a module says while it is imported, has to be lazy."""
    for path, tree in sources():
        eager = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "django.utils.translation"
            for name in node.names
            if name.name in ("gettext", "ngettext")
        }
        within = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, within) for part in ast.walk(node)}
        for call, texts in called(tree):
            assert id(call) in inside or ast.unparse(call.func) not in eager, f"{path.name}: {texts}"


@pytest.fixture
def german(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another language, with a catalogue of a few words."""
    words = {"in doubt": "ungeklärt", "approvals": "Freigaben", "Approval needed": "Freigabe nötig"}
    words |= {"Risk": "Risiko", "high": "hoch", "waiting": "offen", "Requester": "Im Auftrag von"}
    catalogue = trans_real.translation("de")._catalog._catalogs[0]
    for ours, theirs in words.items():
        monkeypatch.setitem(catalogue, ours, theirs)
    with override("de"):
        yield


@pytest.mark.django_db  # who has the address is looked up
def test_words_and_mails_are_in_the_language_of_the_project(
    german: None, settings: Any, mailoutbox: list[Any]
) -> None:
    assert str(Run.Status.ORPHANED.label) == "ungeklärt"
    assert str(Approval._meta.verbose_name_plural) == "Freigaben"
    with override("en"):
        assert str(Run.Status.ORPHANED.label) == "in doubt"
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    notice = Notice(
        id=uuid7(), type="approval.requested", timestamp=datetime(2026, 11, 22, tzinfo=UTC), run_id=uuid7(),
        approval_id=uuid7(), session="s1", agent="support", status="pending", requester="bea",
        title="Refund order A1", tool="refund", risk="high", expires_at=None, url="",
    )  # fmt: skip
    MailNotifier()(notice)
    (letter,) = mailoutbox
    assert letter.subject == "[agentruns] Freigabe nötig: Refund order A1"
    for line in ("Risiko: hoch", "Status: offen", "Im Auftrag von: bea"):
        assert f"\n{line}\n" in letter.body
