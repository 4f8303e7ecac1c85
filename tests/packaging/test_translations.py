"""What a person sees goes through translation, and each catalogue that is shipped has all of it."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.template.base import Lexer, TokenType
from django.utils.translation import override
from django.utils.translation.template import templatize

from agentruns.contrib.mail import MailNotifier
from agentruns.journal.outbox import Notice
from agentruns.models import Approval, Run
from agentruns.utils.ids import uuid7

PACKAGE = Path(__file__).parents[2] / "agentruns"
LANGUAGES = sorted(path.name for path in (PACKAGE / "locale").iterdir())
CALLS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "ngettext": 2, "ngettext_lazy": 2}  # by how many texts
PLACEHOLDER = re.compile(r"%\(\w+\)[sdg]|%[sd]|%%")

SENTENCE = re.compile(r"[A-Z][a-z]*,? [a-z]+")

Texts = tuple[str, ...]  # one, or singular and plural


def catalogue(language: str) -> dict[Texts, Texts]:
    """Read a .po file: no contexts, no fuzzy entries, nothing obsolete."""
    text = (PACKAGE / "locale" / language / "LC_MESSAGES" / "django.po").read_text()
    assert not re.search(r"^#(~|,.*fuzzy)|^msgctxt", text, re.MULTILINE)
    found: dict[Texts, Texts] = {}
    for entry in text.split("\n\n"):
        parts: dict[str, str] = {}
        for name, value in re.findall(r'^(msg\S+) (".*"(?:\n".*")*)', entry, re.MULTILINE):
            parts[name] = "".join(ast.literal_eval(line) for line in value.splitlines())
        said = tuple(parts[name] for name in ("msgid", "msgid_plural") if name in parts)
        assert said not in found, said
        found[said] = tuple(value for name, value in parts.items() if name.startswith("msgstr"))
    found.pop(("",))
    return found


def edges(text: str) -> tuple[bool, bool]:
    """Whether a text begins, and ends, with a space."""
    return text[:1].isspace(), text[-1:].isspace()


def called(tree: ast.AST) -> Iterator[tuple[ast.Call, Texts]]:
    """Yield each call of gettext, and what it is asked to translate."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            texts = [one.value for one in node.args[: CALLS[node.func.id]] if isinstance(one, ast.Constant)]
            yield node, tuple(texts)


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    """Return the modules that translate something."""
    texts = [(path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(path, ast.parse(text)) for path, text in texts if "gettext" in text]


def templates() -> Iterator[tuple[Path, str]]:
    for path in sorted((PACKAGE / "templates").rglob("*.html")):
        yield path, path.read_text()


def in_the_code() -> set[Texts]:
    found = {texts for _path, tree in sources() for _call, texts in called(tree)}
    for _path, source in templates():
        found |= {texts for _call, texts in called(ast.parse("\n".join(calls_in(templatize(source)))))}
    return found


def calls_in(templatized: str) -> list[str]:
    """Return the calls among what Django makes of a template for xgettext."""
    text = r"""u?(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    calls = rf"\b(?:_\({text}\)|gettext\({text}\)|ngettext\({text},\s*{text}, count\))"
    return re.findall(calls, templatized)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_has_what_the_code_says_and_no_more(language: str) -> None:
    assert set(catalogue(language)) == in_the_code()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_translation_is_there_and_fills_in_the_same(language: str) -> None:
    for said, told in catalogue(language).items():
        assert len(said) == len(told) and all(text.strip() for text in told), said
        for ours, theirs in zip(said, told, strict=True):
            assert sorted(PLACEHOLDER.findall(ours)) == sorted(PLACEHOLDER.findall(theirs)), said
            assert edges(ours) == edges(theirs), said


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_compiled_is_what_is_written(language: str) -> None:
    with (PACKAGE / "locale" / language / "LC_MESSAGES" / "django.mo").open("rb") as stream:
        compiled = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
    compiled.pop("")
    written = catalogue(language)
    plain = {said[0]: told[0] for said, told in written.items() if len(said) == 1}
    counted = {
        (said[0], form): told[form] for said, told in written.items() if len(said) == 2 for form in (0, 1)
    }
    assert compiled == plain | counted


def test_templates_have_no_words_of_their_own() -> None:
    """But for a command, which is the same in every language, and what is no word: SHA-256."""
    for path, source in templates():
        words = re.sub(r"<code>manage\.py [^<]*</code>|SHA-256", "", outside_of_tags(source))
        attributes = re.findall(r'\b(?:title|aria-label|placeholder|alt)="([^"]*)"', words)
        said = [*attributes, *re.sub(r"<[^>]*>", "\n", words).split("\n")]
        assert not [text for text in said if re.search(r"[A-Za-z]{2}", text)], path


def outside_of_tags(source: str) -> str:
    """Return a template's text without its tags, variables, comments, and what it translates."""
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


def test_words_are_translated_when_they_are_shown() -> None:
    with override("de"):
        assert str(Run.Status.ORPHANED.label) == "ungeklärt"
        assert str(Approval._meta.verbose_name_plural) == "Freigaben"
        assert str(Run._meta.app_config.verbose_name) == "Agentenläufe"
    assert str(Run.Status.ORPHANED.label) == "orphaned"


def test_a_mail_is_written_in_the_language_of_the_project(settings: Any, mailoutbox: list[Any]) -> None:
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    notice = Notice(
        id=uuid7(),
        type="approval.requested",
        timestamp=datetime(2026, 11, 22, tzinfo=UTC),
        run_id=uuid7(),
        approval_id=uuid7(),
        session="s1",
        agent="support",
        status="pending",
        requester="bea",
        title="Refund order A1",
        tool="refund",
        risk="high",
        expires_at=None,
        url="",
    )
    with override("de"):
        MailNotifier()(notice)
    (letter,) = mailoutbox
    assert letter.subject == "[agentruns] Freigabe nötig: Refund order A1"
    for line in ("Risiko: hoch", "Status: offen", "Im Auftrag von: bea"):
        assert f"\n{line}\n" in letter.body
