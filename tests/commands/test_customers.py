"""Replaying, erasing and exporting the runs of a customer: an owner, a scope, a value of a context."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentruns import list_runs, replay_run, run_agent, start_run, tool
from agentruns.management.commands import replay_run as replaying
from agentruns.models import Message, Run, Session
from agentruns.services.data import erasure
from tests.commands.running import run
from tests.db.helpers import user
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

VERIFIER = Path(__file__).parents[2] / "docs/verify_export.py"
CUSTOMERS = {
    "--owner=ann": {"anns-1", "anns-2"},
    "--scope=north": {"anns-2", "norths"},
    "--context=tenant=7": {"anns-1", "norths"},
    "--owner=ann --scope=north": {"anns-2"},
    "--context=tenant=7 --context=order=A1": {"norths"},
    "--context=tenant=9": set(),
}


@pytest.fixture
def customers() -> dict[str, Run]:
    """Make sessions of several customers; "anns-1" has two runs."""
    ann, agent = user("ann"), shop_agent("shop")
    given: list[tuple[str, dict[str, Any]]] = [
        ("anns-1", {"owner": ann, "context": {"tenant": 7}}),
        ("anns-1", {"owner": ann, "context": {"tenant": "7"}}),
        ("anns-2", {"owner": ann, "scope": "north"}),
        ("norths", {"scope": "north", "context": {"tenant": 7, "order": "A1"}}),
        ("others", {"context": {"tenant": 8}}),
    ]
    runs = {key: run_agent(agent, f"TASK-{key}", key, **options) for key, options in given}
    return {key: Run.objects.get(pk=result.run_id) for key, result in runs.items()}


def erased() -> set[str]:
    return set(Session.objects.filter(messages__content=None).values_list("key", flat=True))


@pytest.mark.parametrize("whose", CUSTOMERS)
def test_a_customer_is_erased_after_a_dry_run_that_counts(customers: dict[str, Run], whose: str) -> None:
    words, expected = ("erase", *whose.split(), "--reason=by letter"), CUSTOMERS[whose]
    would = run(*words, "--dry-run")
    assert (would.code, erased(), "To be erased: " in would.out) == (0, set(), True)
    found = run(*words, "--json")
    assert (found.code, erased(), json.loads(found.out)["sessions"]) == (0, expected, len(expected))
    left = " ".join(str(row.content) for row in Message.objects.all())
    assert {key for key in customers if f"TASK-{key}" in left} == customers.keys() - expected
    assert run("verify_journal").code == 0
    assert run(*words).code == 0  # again, if the first was interrupted


def test_a_customers_names_go_with_the_rows(customers: dict[str, Run]) -> None:
    words = ("erase", "--owner=ann", "--reason=by letter", "--people")
    would = run(*words, "--dry-run")
    assert (would.code, "sessions 2" in would.out, Session.objects.count()) == (0, True, 4)
    assert (run(*words).code, {*Session.objects.values_list("key", flat=True)}) == (0, {"norths", "others"})
    assert run("verify_journal").code == 0
    refused = run("erase", "--session=norths", "--people")
    assert (refused.code, "with a customer" in refused.err) == (2, True)


def test_what_cannot_be_erased_is_reported_and_stops_nothing(
    customers: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_agent("shop", "of two", "others", context={"tenant": 7})
    start_run("shop", "unfinished", "norths", scope="north", context={"tenant": 7})
    whole = erasure._erase

    def fails(session_id: Any, *args: Any, **options: Any) -> Any:
        if Session.objects.get(pk=session_id).key == "anns-2":
            raise OSError("the storage is away")
        return whole(session_id, *args, **options)

    monkeypatch.setattr(erasure, "_erase", fails)
    found = run("erase", "--context=tenant=7", "--reason=r")
    assert (found.code, erased()) == (1, {"anns-1"})
    assert "Session 'norths': " in found.out
    assert (
        f"Session 'others': Run {customers['others'].pk} of the session has another tenant in its"
        in found.out
    )
    found = run("erase", "--owner=ann", "--reason=r")
    assert (found.code, "Session 'anns-2': the storage is away" in found.out) == (1, True)


@pytest.mark.parametrize("whose", CUSTOMERS)
def test_a_customer_is_exported_one_file_for_each_session(
    customers: dict[str, Run], whose: str, tmp_path: Path
) -> None:
    outcome = run("export_run", *whose.split(), f"--folder={tmp_path}")
    files = {path.name for path in tmp_path.iterdir()}
    assert (outcome.code, files) == (0, {f"{customers[key].pk}.jsonl" for key in CUSTOMERS[whose]})
    assert f"Runs: {len(files)}, of which 0 went wrong." in outcome.out
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} <= {0o600}
    for path in tmp_path.iterdir():
        said = subprocess.run([sys.executable, VERIFIER, path], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr


def test_an_export_discloses_no_other_customer(customers: dict[str, Run], tmp_path: Path) -> None:
    run_agent("shop", "of two", "others", context={"tenant": 7})
    outcome = run("export_run", "--context=tenant=7", f"--folder={tmp_path}")
    assert (outcome.code, len(list(tmp_path.iterdir()))) == (1, 2)
    assert "has another tenant" in outcome.out
    assert "Runs: 3, of which 1 went wrong." in outcome.out


@pytest.mark.parametrize("other", [{}, {"order": "A1"}, {"tenant": "9" * 300}, {"tenant": [7]}])
def test_a_session_with_a_run_that_may_be_anothers_is_no_customers(
    customers: dict[str, Run], other: dict[str, Any], tmp_path: Path
) -> None:
    """The other run's value is absent, or one that the index lacks."""
    its = run_agent("shop", "of two", "anns-1", owner=customers["anns-1"].owner, context=other).run_id
    found = run("erase", "--context=tenant=7", "--reason=r")
    assert (found.code, erased()) == (1, {"norths"})
    assert f"Session 'anns-1': Run {its} of the session has another tenant in its context, or" in found.out
    assert run("export_run", "--context=tenant=7", f"--folder={tmp_path}").code == 1
    assert list(tmp_path.iterdir()) == [], "the other is erased"
    run_agent("shop", "TASK-new", "norths", scope="north", context={"tenant": 7})
    found = run("erase", "--context=tenant=7", "--reason=r")
    assert "norths" not in found.out and "TASK-new" not in str([row.content for row in Message.objects.all()])


def test_values_that_no_search_finds_are_erased_and_exported(tmp_path: Path) -> None:
    """Others have more names than the index takes, a long value, a sensitive name, or a list."""

    @tool(sensitive=["pin"])
    def unlock(pin: str) -> str:
        """Unlock."""
        return "ok"

    agent = shop_agent("shop", tools=[unlock])
    many = {f"k{number:02}": number for number in range(20)}
    given = {"zone": "7", "long": "x" * 250, "pin": "998877", "list": "[1,2]", "none": "null"}
    for name, value in given.items():
        kept = {"list": [1, 2], "none": None}.get(name, value)
        run_agent(agent, "TASK", name, context={**(many if name == "zone" else {}), name: kept})
    run_agent(agent, "TASK", "other", context={"zone": "70", "long": "x" * 251})
    assert not list_runs(context=given).exists()
    for name, value in given.items():
        (folder := tmp_path / name).mkdir()
        assert run("export_run", f"--context={name}={value}", f"--folder={folder}").code == 0
        assert len(list(folder.iterdir())) == 1
        assert run("erase", f"--context={name}={value}", "--reason=r").code == 0
    assert erased() == {*given}


def test_a_customers_runs_are_replayed_and_one_that_fails_stops_nothing(
    customers: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run("replay_run", "--context=tenant=7")
    assert (outcome.code, outcome.out.count("Nothing differs.")) == (0, 3)

    def fails(run_id: str, **options: Any) -> Any:
        if run_id == str(customers["norths"].pk):
            raise ConnectionError("no model")
        return replay_run(run_id, **options)

    monkeypatch.setattr(replaying, "replay_run", fails)
    outcome = run("replay_run", "--scope=north", "--json")
    assert (outcome.code, outcome.lines[-1]) == (1, {"runs": 2, "wrong": 1})
    assert {each["run"] for each in outcome.lines[:-1]} == {
        str(customers[key].pk) for key in CUSTOMERS["--scope=north"]
    }
    shop_agent("shop", instructions="Serve nobody.")
    outcome = run("replay_run", "--owner=ann")
    assert (outcome.code, outcome.out.count("The first difference")) == (1, 3)


@pytest.mark.parametrize(
    "words",
    [
        "erase --reason=r", "erase --reason=r --session=s --context=a=b", "erase --owner=ann",
        "erase --owner=ann --row x 1 --reason=r", "erase --owner=nobody --reason=r", "replay_run",
        "erase --context=tenant --reason=r", "replay_run x --owner=ann", "export_run",
        "erase --scope= --reason=r", "export_run --scope= --folder=.", "erase --scope= --context= --reason=r",
        "export_run --owner=ann", "export_run x --folder=.", "export_run x --folder=. --owner=ann",
    ],
)  # fmt: skip
def test_usage_that_names_nobody_or_two(customers: dict[str, Run], words: str) -> None:
    assert run(*words.split()).code == 2
    assert erased() == set()


def test_the_service_erases_nobody_without_a_name(customers: dict[str, Run]) -> None:
    for whose in ({}, {"owner": None, "scope": None, "context": {}}, {"scope": ""}):
        with pytest.raises(ValueError, match="Say whose"):
            erasure.erase_customer(None, "r", **whose)
    assert erased() == set()
    ann = customers["anns-1"].owner
    assert {each.session.key for each in list_runs(owner=ann, scope="north")} == {"anns-2"}
    assert {each.session.key for each in list_runs(context={"tenant": 7})} == {"anns-1", "norths"}
