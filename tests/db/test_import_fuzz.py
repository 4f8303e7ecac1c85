"""Whatever becomes of an export: it is imported whole, or refused with a reason and nothing is stored."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentruns import approve, export_run, run_agent
from agentruns.exceptions import PayloadError, RunStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Run, Session
from agentruns.models.parts import commitment
from agentruns.services.sweep import sweep
from agentruns.services.transfer import import_run
from agentruns.utils import json as canonical
from tests.commands.running import run as command
from tests.db.exports import Line, forget_everything, report, sealed
from tests.db.helpers import the_run
from tests.settings import BRIEF
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OUTSIDE = {"prev_hash", "hash", "facts", "facts_salt", "content", "content_salt"}


def exported(folder: Path) -> list[Line]:
    """Return an export with a file and an approval, from a database that has forgotten it."""
    turns = [{"tools": [call("report"), call("refund", cents=5000)]}]
    agent = shop_agent("reporting", *turns, tools=[report, *TOOLS])
    run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    lines = [json.loads(json.dumps(line)) for line in export_run(run.pk, true_values=True)]
    forget_everything()
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    return lines


def chained(lines: list[Line]) -> list[Line]:
    """Return lines with all commitments and hashes computed anew, as a forger would."""
    head = ""
    for line in lines:
        if "seq" not in line:
            continue
        for part in ("facts", "content"):
            if isinstance(line.get(part), str) and isinstance(line.get(f"{part}_salt"), str):
                line[f"{part}_hash"] = commitment(line[f"{part}_salt"], line[part])
        line["prev_hash"] = head or line["prev_hash"]
        row = {name: value for name, value in line.items() if name not in OUTSIDE}
        row["session"] = lines[0]["session"]["id"]
        line["hash"] = head = canonical.sha256(line["prev_hash"] + canonical.dumps(row))
    lines[0]["head"]["hash"] = head
    return sealed(lines)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        found += places(inner, (*path, name))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for name in path[:-1]:
        value = value[name]
    value[path[-1]] = new


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            1.0,
            2**31,
            2**63,
            10**400,
            "",
            "\x00",
            "\ud800",
            "x" * 300,
            "../../etc/passwd",
            {},
            [],
        ]
    ),
    st.text(max_size=5),
    st.integers(),
    st.sampled_from([150, 900]).map(nested),
    st.sampled_from(["2026-01-01", "9999-12-31T23:59:59-23:59", "01a20189-67e9-70a1-9b0c-1b07670a3b0b"]),
)


def mutated(lines: list[Line], data: st.DataObject) -> None:
    """Change one place of the lines, or inside the text of one part of a row."""
    number = data.draw(st.integers(0, len(lines) - 2))
    line, odd = lines[number], data.draw(ODD)
    if "seq" in line and data.draw(st.booleans()):
        part = data.draw(st.sampled_from(["facts", "content"]))
        payload = json.loads(line[part])
        paths = places(payload)
        if paths:
            put(payload, data.draw(st.sampled_from(paths)), odd)
        try:
            line[part] = canonical.dumps(payload)
        except (ValueError, TypeError):
            line[part] = json.dumps(payload)
        return
    put(line, data.draw(st.sampled_from(places(line))), odd)


def resealed(lines: list[Line]) -> list[Line]:
    try:
        return chained(copy.deepcopy(lines))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return lines


def nothing_is_stored(folder: Path) -> bool:
    rows = any(model.objects.exists() for model in (Session, Run, Message, Approval, Definition))
    return not rows and not [path for path in folder.rglob("*") if path.is_file()]


def test_any_change_is_refused_or_imported_whole(folder: Path) -> None:
    lines = exported(folder)

    @settings(max_examples=40 if BRIEF else 400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = copy.deepcopy(lines)
        mutated(made, data)
        if data.draw(st.booleans()):
            made = resealed(made)
        try:
            run = import_run(made)
        except (RunStateError, PayloadError):
            assert nothing_is_stored(folder)
            return
        assert problems(run.session_id) == []
        forget_everything()
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()

    check()
    assert import_run(lines).status == "completed"


def named(name: str) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        session = lines[0]["session"]["id"]
        for line in lines:
            if '"stored"' in (line.get("content") or ""):
                content = json.loads(line["content"])
                content["stored"]["name"] = name.format(session=session)
                line["content"] = canonical.dumps(content)

    return change


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../secret", "{session}/../x", "{session}/a/b", "{session}/", "{session}/..",
        "{session}",
        "{session}/.hidden", "{session}/a\\b", "{session}/a\x00b", "other", "", "{session}/a\u202eb",
        "01a20189-67e9-70a1-9b0c-1b07670a3b0b/input-00", "{session}/" + "a" * 300,
    ],
)  # fmt: skip
def test_a_file_has_the_name_of_one_of_its_session(name: str, folder: Path) -> None:
    lines = exported(folder)
    named(name)(lines)
    with pytest.raises(PayloadError, match=r"^Line \d+: .* is not named as the files of its session are"):
        import_run(chained(lines))
    assert nothing_is_stored(folder)


def test_no_file_is_stored_if_a_later_one_is_altered(folder: Path) -> None:
    lines = exported(folder)
    two = copy.deepcopy(lines)
    for line in two:
        if "data" in line:
            line["data"] = "AAAA"
    with pytest.raises(PayloadError, match="was altered"):
        import_run(sealed(two))
    assert nothing_is_stored(folder)


@pytest.mark.parametrize("text", ['{"format": ' + "[" * 100_000, "[]", "7", "nonsense", '{"format": 1e999}'])
def test_a_line_that_is_none_is_named(text: str, tmp_path: Path, folder: Path) -> None:
    lines = exported(folder)
    file = tmp_path / "export.jsonl"
    file.write_text("\n".join([json.dumps(lines[0]), text, *map(json.dumps, lines[2:])]))
    outcome = command("import_run", str(file))
    assert (outcome.code, outcome.out) == (1, "")
    assert "Line " in outcome.err
    assert "Traceback" not in outcome.err
    assert nothing_is_stored(folder)
