"""Which run a log record is about: in drives, in threads, in services, and for the project's own loggers."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import re
from typing import Any

import pytest

from agentruns import approve, tool
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from agentruns.utils.redaction import RunFilter, bound, driven
from tests.db.helpers import run_turns, the_run
from tests.programs import ROOT
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)


def about(record: Any) -> tuple[str, int]:
    return record.run_id, record.epoch


@tool(safe_to_retry=True, parallel=True)
def fragile(number: int) -> str:
    """Fail in a thread of its own, of which the project's own logger says something."""
    logging.getLogger("shop").warning("looking at %s", number)
    raise ValueError("nothing there")


def test_records_of_a_drive_name_its_run_and_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(on_handler := RunFilter())
    try:
        turn = {"tools": [call("broken"), call("fragile", number=1), call("fragile", number=2)]}
        run = the_run(run_turns(turn, {"tools": [call("refund", cents=5000)]}, tools=[*TOOLS, fragile]))
        approve(Approval.objects.get().pk, None)
        sweep()
    finally:
        caplog.handler.removeFilter(on_handler)
    failures = [record for record in caplog.records if record.getMessage().startswith("Tool failed")]
    assert [about(record) for record in failures] == [(str(run.pk), 1)] * 3
    own = [record for record in caplog.records if record.name == "shop"]
    assert [about(record) for record in own] == [(str(run.pk), 1)] * 2
    assert driven() == ("", 0), "nothing is left behind"


def test_a_record_about_no_run_says_so_and_one_that_knows_its_run_keeps_it() -> None:
    record = logging.makeLogRecord({"msg": "hello"})
    RunFilter().filter(record)
    assert about(record) == ("", 0)
    own = logging.makeLogRecord({"msg": "hello", "run_id": "mine", "epoch": 3})
    with bound("another", 4):
        RunFilter().filter(own)
    assert about(own) == ("mine", 3)


def test_the_page_s_settings_write_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/observability.md are run as they are."""
    page = (ROOT / "docs" / "observability.md").read_text()
    formatter, configuration = (
        next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if word in block)
        for word in ("class JsonFormatter", "LOGGING = ")
    )
    names: dict[str, Any] = {}
    exec(formatter, names)
    exec(configuration, names)
    written = io.StringIO()
    config = names["LOGGING"]
    config["formatters"]["json"]["()"] = names["JsonFormatter"]
    config["handlers"]["json"]["stream"] = written
    config["loggers"] = {"agentruns": config.pop("root")}  # the root logger is pytest's
    logging.config.dictConfig({**config, "disable_existing_loggers": False})
    try:
        run_turns({"tools": [call("broken")]})
    finally:
        logger = logging.getLogger("agentruns")
        logger.setLevel(logging.NOTSET)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
    [line] = written.getvalue().splitlines()
    said = json.loads(line)
    assert (said["run_id"], said["epoch"], said["level"]) == (str(Run.objects.get().pk), 1, "ERROR")
    assert said["logger"] == "agentruns.executor" and "on fire" in said["error"]
