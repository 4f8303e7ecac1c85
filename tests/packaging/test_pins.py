"""What is installed for the demo, the tests and the checks has a version, and each of its files a hash."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import audit

ROOT = Path(__file__).parents[2]
PINS = re.compile(r"^([\w.-]+(?:\[[^\]]*\])?==[^\s;\\]+)", re.MULTILINE)
LOCKED = ["locked.txt", "locked-dev.txt"]


@pytest.mark.parametrize("name", LOCKED)
def test_each_pin_has_hashes_and_the_version_of_the_constraints(name: str) -> None:
    text = (ROOT / name).read_text()
    pins = {*PINS.findall(text)}
    assert pins <= {*PINS.findall((ROOT / "constraints.txt").read_text())}
    assert {"Django", "django"} & {pin.partition("==")[0] for pin in pins}
    requirements = re.split(r"\n(?=\S)", text.strip())
    assert len(requirements) >= len(pins)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", each) for each in requirements)


def test_the_makefile_installs_nothing_without_a_hash() -> None:
    calls = re.findall(r"\$\(call install,(.*)\)", (ROOT / "Makefile").read_text())
    hashed = [f"--require-hashes -r {name}" for name in LOCKED]
    own = "--no-deps --no-build-isolation -e ."  # our own source, built by what is locked
    benchmarks = "-r requirements-bench.txt"  # peers, in an environment of their own
    assert {*calls} == {*hashed, own, benchmarks}


def test_the_audit_names_what_is_affected_and_says_where_it_has_no_advisories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins, file = audit.pinned(audit.PINS.read_text()), tmp_path / "answer.json"
    (name, version), none = pins[0], "NOT AUDITED: no advisories to compare"
    for first, answers, code, said in (
        ({}, len(pins), 0, "0 with advisories"),
        ({"vulns": [{"id": "PYSEC-2026-1"}]}, len(pins), 1, f"{name} {version}: PYSEC-2026-1"),
        ({}, len(pins) - 1, 0, none),  # an answer that is none
    ):
        file.write_text(json.dumps({"results": [first, *({} for _ in range(answers - 1))]}))
        assert audit.main(file.as_uri()) == code
        assert said in capsys.readouterr().out
    assert audit.main("http://127.0.0.1:9/") == 0, "nobody is there"
    assert none in capsys.readouterr().out
