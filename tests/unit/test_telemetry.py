"""What listens to runs is told, or not asked at all; whatever it does, nothing reaches the run."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from agentruns import run_agent
from agentruns.journal import telemetry
from agentruns.journal.telemetry import Facts
from agentruns.utils.redaction import bound, driven
from tests.programs import run_program
from tests.shop.agents import call, shop_agent


class Notebook:
    """A listener of a project's own."""

    told: ClassVar[list[tuple[str, Facts]]] = []

    @contextmanager
    def span(self, name: str, facts: Facts) -> Iterator[None]:
        yield
        self.told.append((name, facts))

    def event(self, name: str, facts: Facts) -> None:
        self.told.append((name, facts))

    @contextmanager
    def carried(self) -> Iterator[None]:
        self.told.append(("carried", {"thread": threading.current_thread().name}))
        yield


class Failing:
    """A listener of which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} today")


class FailingLater(Notebook):
    """A listener that fails where it is in the middle of something."""

    @contextmanager
    def span(self, name: str, facts: Facts) -> Iterator[None]:
        try:
            yield
        finally:
            raise KeyError(name)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_made", {})
    monkeypatch.setattr(telemetry, "_complained", set())
    Notebook.told.clear()


def listen(settings: Any, name: str) -> None:
    settings.AGENTRUNS_TELEMETRY = f"{__name__}.{name}"


def never() -> Facts:
    raise AssertionError("asked though nobody listens")


def test_facts_are_made_only_for_somebody_and_the_error_of_a_block_goes_through(settings: Any) -> None:
    with telemetry.span("tool", never) as told:
        told["outcome"] = "ok"
    telemetry.event("sweep", {})
    assert telemetry.listener() is None
    for name in ("Notebook", "FailingLater"):
        listen(settings, name)
        with pytest.raises(ZeroDivisionError), telemetry.span("tool", dict):
            raise ZeroDivisionError


def test_a_listener_of_the_project_s_own(settings: Any) -> None:
    listen(settings, "Notebook")
    agent = shop_agent("noted", {"tools": [call("broken"), call("post", text="hi")]})
    assert run_agent(agent, "do it").status == "completed"
    names = [name for name, _ in Notebook.told]
    assert names == ["model", "tool", "tool", "model", "ended", "drive"]
    facts = [facts for _, facts in Notebook.told]
    assert [one["outcome"] for one in facts[1:3]] == ["error", "ok"]
    assert facts[4] == {"run_id": facts[5]["run_id"], "agent": "noted", "epoch": 0, "status": "completed"}
    assert (facts[5]["status"], facts[5]["steps"]) == ("completed", 2)


@pytest.mark.parametrize("name", ["Failing", "FailingLater", "gone"])
def test_what_a_listener_raises_touches_no_run(
    name: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    listen(settings, name)
    agent = shop_agent("robust", {"tools": [call("broken"), call("search", query="x")]})
    assert run_agent(agent, "do it").output == "all done"
    said = [record for record in caplog.records if record.name == "agentruns.telemetry"]
    assert [record.levelno for record in said] == [logging.ERROR], "once"


def test_another_thread_is_part_of_what_made_it(settings: Any) -> None:
    listen(settings, "Notebook")
    with bound("a-run", 7):
        carried = telemetry.carried()

    def work() -> list[Any]:
        with carried:
            seen = driven()
        return [seen, driven()]

    with ThreadPoolExecutor(1, "another") as thread:
        assert thread.submit(work).result() == [("a-run", 7), ("", 0)]
    assert Notebook.told == [("carried", {"thread": "another_0"})]


def test_everything_else_works_without_opentelemetry() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import django; django.setup()\n"
        "from agentruns import Agent, run_agent\n"
        "from agentruns.journal import telemetry\n"
        "from agentruns.testing import ScriptedModel\n"
        "agent = Agent('a', instructions='Go.', model=ScriptedModel([{'text': 'done'}]))\n"
        "assert run_agent(agent, 'go').output == 'done'\n"
        "from django.test import override_settings\n"
        "with override_settings(AGENTRUNS_TELEMETRY='agentruns.contrib.opentelemetry.OpenTelemetry'):\n"
        "    assert run_agent(agent, 'go').output == 'done' and telemetry.listener() is None\n"
    )
    done = run_program(sys.executable, "-c", program)
    assert "AGENTRUNS_TELEMETRY failed" in done.stderr
