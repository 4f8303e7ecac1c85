"""What is installed for the demo, the tests and the checks has a version, and each of its files a hash."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

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


class Advisories(BaseHTTPRequestHandler):
    """Answers like osv.dev: what the test says about the first pin, nothing about the others."""

    first: list[dict[str, str]] = []
    cut = 0

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        assert all(query["package"]["ecosystem"] == "PyPI" and query["version"] for query in queries)
        results: list[dict[str, Any]] = [
            {"vulns": self.first} if self.first else {},
            *({} for _ in queries[1:]),
        ]
        body = json.dumps({"results": results[self.cut :]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def osv(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_audit_names_what_is_affected(
    osv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(osv) == 0
    name, version = audit.pinned(audit.PINS.read_text())[0]
    assert "0 with advisories" in capsys.readouterr().out
    monkeypatch.setattr(Advisories, "first", [{"id": "PYSEC-2026-1"}])
    assert audit.main(osv) == 1
    assert f"{name} {version}: PYSEC-2026-1" in capsys.readouterr().out


def test_an_audit_without_advisories_says_so(
    osv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Advisories, "cut", 1)
    for url in (osv, "http://127.0.0.1:9/"):  # an answer that is none; nobody there
        assert audit.main(url) == 0
        assert "NOT AUDITED: no advisories to compare" in capsys.readouterr().out
