"""Any single change of an export is found, by the verifier that needs nothing of ours and by the import.

Who changes a line can also compute the hash of all lines anew; then the chain, the definitions and the run
still show it, except in the few places that docs/audit.md lists.
"""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from agentruns import adopt_definition, export_run, resume_run, run_agent, start_run, tool
from agentruns.exceptions import AgentRunsError
from agentruns.journal.verify import problems
from agentruns.models import Definition, Run, Session
from agentruns.services.transfer import import_run
from agentruns.tools import ToolContext
from tests.db.exports import VERIFY, Line, forget_everything, report, sealed
from tests.db.helpers import the_run
from tests.registry import isolated_registry
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

# Where the hash of all lines alone protects an export: line and member.
ONLY_WHOLE = {
    *product(["header"], ["exported_at", "session.key", "session.scope", "session.secret", "extra"]),
    ("definition", "extra"),
    # Doubled is a second line that says why a file is left out.
    *product(["file"], ["file", "part", "extra", "left_out", "doubled"]),
    *product(["redacted"], ["content_redacted", "facts_redacted"]),
}
# A part that is taken out is as good as hidden.
HIDES = {*product(["row", "redacted"], ["content removed", "facts removed"])}


@tool(name="whisper", sensitive=["token"])
def whisper(ctx: ToolContext, token: str) -> str:
    """Act with a secret."""
    return act("whisper", ctx)


def story() -> Run:
    """Make a session with a definition adopted, a file, a secret and two runs."""
    turn, tools = {"tools": [call("report"), call("whisper", token="tok_42")]}, [report, whisper]
    with isolated_registry():
        run = start_run(shop_agent("told", turn, tools=tools), "do it", "s1", idempotency_key="k")
    shop_agent("told", turn, tools=tools, max_steps=7)
    adopt_definition(run.pk, None, reason="newer")
    assert resume_run(run.pk).status == "completed"
    return the_run(run_agent(shop_agent("second"), "more", "s1", idempotency_key="k2"))


VERIFIER = runpy.run_path(str(VERIFY), run_name="verify_export")


def lines_of(run: Run, **options: Any) -> list[Line]:
    return [json.loads(json.dumps(line)) for line in export_run(run.pk, **options)]


def found(lines: list[Line]) -> list[str]:
    """Verify these lines; that the verifier cannot read them counts as a problem."""
    try:
        return list(VERIFIER["problems"](iter(copy.deepcopy(lines))))
    except Exception as error:
        return [repr(error)]


def kind_of(line: Line) -> str:
    kinds = {"format": "header", "facts_redacted": "redacted", "content_redacted": "redacted"}
    kinds |= {name: name for name in ("definition", "file", "end")}
    return next((kind for name, kind in kinds.items() if name in line), "row")


def changed(value: Any) -> Any:
    """Make another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value is None:
        return "01a20189-67e9-70a1-9b0c-1b07670a3b0b"
    if str(value).startswith("{"):
        return json.dumps({**json.loads(value), "v": 0}, sort_keys=True, separators=(",", ":"))
    last = "1" if value[-1:] == "0" else "0"
    return value[:-5] + last * 5 if value.endswith("=") else value[:-1] + last


def members(line: Line, before: str = "") -> Iterator[tuple[str, Line, str]]:
    """Yield path, container and name of each member."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from members(value, f"{before}{name}.")
        else:
            yield before + name, line, name


def mutations(lines: list[Line]) -> Iterator[tuple[str, str, list[Line]]]:
    """Yield each single change: the kind of line, what was done, and the lines after it."""
    for number, line in enumerate(lines):
        kind = kind_of(line)
        yield kind, "dropped", lines[:number] + lines[number + 1 :]
        yield kind, "doubled", [*lines[: number + 1], *lines[number:]]
        yield kind, "extra added", [*lines[:number], {**line, "extra": 1}, *lines[number + 1 :]]
        if number + 1 < len(lines):
            swapped = [*lines[:number], lines[number + 1], line, *lines[number + 2 :]]
            yield f"{kind}, {kind_of(lines[number + 1])}", "moved", swapped
        for path, _, name in members(line):
            for done in ("removed", "changed"):
                again = copy.deepcopy(lines)
                where = next(each for place, each, _ in members(again[number]) if place == path)
                value = where.pop(name)
                if done == "changed":
                    where[name] = changed(value)
                yield kind, f"{path} {done}", again


@pytest.mark.parametrize("true_values", [True, False])
def test_any_single_change_is_found_also_in_an_export_sealed_anew_and_is_not_imported(
    true_values: bool, folder: Path
) -> None:
    lines = lines_of(story(), true_values=true_values)
    kinds = {"header", "definition", "row", "file", "end"}
    assert {kind_of(line) for line in lines} == (kinds if true_values else {*kinds, "redacted"})
    assert found(lines) == []
    assert sealed(lines) == lines
    forget_everything()
    unseen = set()
    for kind, done, after in mutations(lines):
        assert found(after), (kind, done)
        if kind != "end" and done != "moved" and not found(sealed(after)):
            unseen.add((kind, done if (kind, done) in HIDES else done.split()[0]))
        if true_values:
            with pytest.raises(AgentRunsError):
                import_run(after)
                pytest.fail(f"{kind}, {done}")
    # A redacted row does not have the hash of its file, which would tell what is in it: the line that says
    # why the file was left out stands for nothing that the chain could miss.
    reason = set() if true_values else {("file", "doubled"), ("file", "dropped"), ("file", "of")}
    assert unseen <= ONLY_WHOLE | HIDES | reason
    assert (("redacted", "content_redacted") in unseen) is not true_values
    assert not Session.objects.exists()
    if true_values:
        assert problems(import_run(lines).session_id) == []


def test_a_definition_altered_in_the_database_is_found() -> None:
    run = the_run(run_agent(shop_agent("told"), "do it", "s1", idempotency_key="k"))
    body = Definition.objects.get(pk=run.definition_id).body
    Definition.objects.filter(pk=run.definition_id).update(body={**body, "instructions": "Obey."})
    assert problems(run.session_id) == [f"Session s1: definition {run.definition_id} was altered."]
