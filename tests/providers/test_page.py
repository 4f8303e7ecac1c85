"""The page about models says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentruns.agents import prices
from agentruns.content import IMAGES, PDF, PLAIN
from agentruns.files import GIF
from agentruns.providers import failures
from agentruns.providers.attachments import NO_LIMIT, limits_of
from agentruns.providers.chat import QUIRKS, Quirks
from agentruns.providers.names import PROVIDERS, model_identity, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

ANY = "what it sent, until the user speaks again"  # of a server without a name of its own


def defined(word: str) -> dict[str, Any]:
    """Run the block with a word, and collect its names."""
    (block,) = [one for one in BLOCKS if one.startswith("# settings.py") and word in one]
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def test_its_settings_and_names_can_be_used(settings: Any) -> None:
    settings.AGENTRUNS_MODELS = defined("AGENTRUNS_MODELS")["AGENTRUNS_MODELS"]
    found = {name: model_identity(resolve(name)) for name in settings.AGENTRUNS_MODELS}
    assert found == {"local": "ollama:llama3.3", "house": "azure:gpt-5.4", "gateway": "openai:gpt-5.4"}
    assert prices.mistakes(defined("AGENTRUNS_PRICES")["AGENTRUNS_PRICES"]) == []
    (table,) = re.findall(r"## Names\n\n(.*?)\n\n", PAGE, re.DOTALL)
    named = {name.partition(":")[0] for name in re.findall(r'`"([^"]+:[^"]+)"`', table)}
    assert named == PROVIDERS == {"anthropic", *QUIRKS}


@pytest.mark.parametrize(
    ("column", "quirks"),
    [
        (1, QUIRKS["openai"]), (2, QUIRKS["openrouter"]), (3, QUIRKS["ollama"]), (3, QUIRKS["vllm"]),
        (4, Quirks()),
    ],
)  # fmt: skip
def test_its_table_of_servers_is_that_of_the_code(column: int, quirks: Quirks) -> None:
    rows = {}
    for line in re.findall(r"^\| (?:limit of|reasoning sent).*$", PAGE, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0].split()[0]] = cells[column].strip("`")
    assert rows["limit"] == quirks.max_tokens
    assert rows["reasoning"] == (quirks.takes_back or ("over Responses" if column == 1 else ANY))


def test_its_table_of_files_is_that_of_the_code() -> None:
    kinds = {each: each.partition("/")[2].upper().replace("WEBP", "WebP") for each in (*IMAGES, PDF)}
    kinds[PLAIN] = "text"
    told = {}
    for line in re.findall(r"^\| `\w+`.* \| [\d.]+ MB \|.*$", PAGE, re.MULTILINE):
        names, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), cells)
    assert told.keys() == PROVIDERS
    for name, (types, animated, picture, side, whole, pages, files) in told.items():
        limits = limits_of(f"{name}:any")
        assert set(types.split(", ")) == {kinds[each] for each in limits.types}
        sizes = [int(size // 4 * 3 / 1e5) / 10 for size in (limits.image, limits.request)]
        assert [f"{size} MB" for size in sizes] == [picture, whole]
        assert int(files) == limits.files
        if GIF in limits.types:
            assert animated == ("yes" if limits.animated else "no")
        assert side == ("any" if limits.side == NO_LIMIT else f"{limits.side} x {limits.side}")
        if PDF in limits.types:
            assert pages == ("any" if limits.pages == NO_LIMIT else str(limits.pages))
    assert limits_of("elsewhere:any") == limits_of("openrouter:any")
    assert limits_of("claude-any") == limits_of("anthropic:any")


def test_its_table_of_errors_is_that_of_the_code() -> None:
    dispositions = {"`queued`": "retry", "`paused`": "pause", "asked again once": "fail"}
    lines = re.findall(r"^\| (\d{3}, .*) \| (`\w+`|asked again once).*$", PAGE, re.MULTILINE)
    assert [status for _, status in lines] == [*dispositions]
    for said, status in lines:
        for number in re.findall(r"\b\d{3}\b", said):
            assert failures.of_status(int(number)) == dispositions[status]
        for code in {*re.findall(r"`([a-z]+_[a-z_]+)`", said)} - {"foreign_block"}:
            assert failures.judged(None, code) == dispositions[status]
