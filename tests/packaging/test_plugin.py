"""What agentruns.testing and its pytest plugin do for a host project, and what they must not do to it."""

from __future__ import annotations

import re
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from agentruns import Occurred, ToolContext, approve, resume_run, run_agent, start_run, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.testing import (
    Crash,
    DatabaseClock,
    EffectsLedger,
    StillRunning,
    check_messages,
    crashing_at,
    expire_leases,
    frozen_clock,
    manage_py,
    run_until_blocked,
)
from tests.db.helpers import outcomes, the_run
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent
from tests.shop.models import Order

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


def busy(request: object) -> Any:
    raise ProviderError("Overloaded", disposition="retry", retry_after=90)


# Crashes

POINTS = {  # where it dies -> effects by then, status after the take-over
    "after_start": (0, "completed"), "before_model": (0, "completed"), "after_model": (0, "completed"),
    "after_reply": (0, "orphaned"), "before_tool": (0, "orphaned"), "after_tool": (1, "orphaned"),
    "before_result_commit": (1, "orphaned"), "after_result": (1, "completed"),
    "before_finish": (1, "completed"),
}  # fmt: skip


@pytest.mark.parametrize("transaction", [False, True], ids=["in a TestCase", "committed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_dead_driver_keeps_its_lease_until_it_expires(
    request: pytest.FixtureRequest, effects: Effects, point: str, transaction: bool
) -> None:
    request.getfixturevalue("transactional_db" if transaction else "db")
    acted, status = POINTS[point]
    with crashing_at(point):
        run_agent("calls-post", "do it", "s1", idempotency_key="k")
    run = Run.objects.get()
    assert (run.status, run.lease_expires_at is not None, effects.count()) == ("running", True, acted)
    with pytest.raises(StillRunning, match=r"expire_leases\(\)"):
        run_until_blocked()
    assert expire_leases() == 1
    [result] = run_until_blocked()
    assert result.status == status
    if status == "orphaned":
        result = resume_run(run.pk)
    assert (result.status, effects.count()) == ("completed", acted if status == "orphaned" else 1)
    assert problems(run.session_id) == []
    check_messages(result.messages)


@pytest.mark.django_db
def test_a_block_that_does_not_die_fails(effects: Effects) -> None:
    with crashing_at("before_start_commit"):
        start_run("calls-post", "do it", "s1", idempotency_key="k")
    assert (Run.objects.count(), run_until_blocked()) == (0, [])
    with pytest.raises(RuntimeError, match="transaction=True"):  # a process could see nothing of this test
        manage_py("resume_runs")
    with pytest.raises(AssertionError, match="after_decision was not reached"), crashing_at("after_decision"):
        run_agent("calls-post", "do it", "s1", idempotency_key="k")
    with pytest.raises(ValueError, match="no crash point"), crashing_at("nowhere"):
        pass
    with pytest.raises(Crash, match="another"), crashing_at("after_tool"):
        raise Crash("another")
    assert run_agent("calls-post", "do it", "s2", idempotency_key="k2").status == "completed"
    with crashing_at("before_model:2"):
        run_agent("calls-post", "do it", "s3", idempotency_key="k3")
    assert effects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_a_child_is_killed_and_plays_the_same_script(effects: Effects, scripted_model: Any) -> None:
    agent = shop_agent("calls-charge")
    scripted_model(agent, [{"tools": [call("charge", cents=7)]}, {"text": "charged"}])
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    manage_py("resume_runs", crash_at="after_tool")
    assert effects.count() == 1
    expire_leases()
    [result] = run_until_blocked(run)
    assert (result.output, effects.count(), outcomes(the_run(result))) == ("charged", 1, ["ok"])
    with pytest.raises(AssertionError, match=r"(?s)did not get to after_tool.*improperly configured"):
        manage_py("flush", "--no-input", "--database=other", crash_at="after_tool")  # not this test's


# Driving


@pytest.mark.django_db
def test_every_run_goes_as_far_as_it_can(effects: Effects) -> None:
    agents = ("calls-post", "calls-refund", "calls-lookup")
    runs = [start_run(agent, "do it", agent, idempotency_key=agent) for agent in agents]
    results = run_until_blocked()
    assert [result.run_id for result in results] == [str(run.pk) for run in runs]
    assert [result.status for result in results] == ["completed", "awaiting-approval", "completed"]
    assert run_until_blocked() == []
    approve(results[1].pending[0].pk, None)
    others = start_run("calls-post", "do it", "left", idempotency_key="left")
    [result] = run_until_blocked(results[1])
    assert (result.status, Run.objects.get(pk=others.pk).status) == ("completed", "queued")
    assert run_until_blocked(runs[1].pk) == [result] == run_until_blocked(str(runs[1].pk))
    assert effects.count() == 3


@pytest.mark.django_db
def test_a_run_that_goes_on_and_on_is_named_and_skipped_time_counts_against_the_deadline() -> None:
    run = start_run(shop_agent("hopeless", busy), "do it", "s1", idempotency_key="k")
    assert [result.status for result in run_until_blocked()] == ["queued"]
    with pytest.raises(StillRunning, match=str(run.pk)):
        run_until_blocked(fast_forward=True, sweeps=4)
    agent = shop_agent("late", busy, deadline=timedelta(minutes=5), on_budget="fail")
    late = start_run(agent, "do it", "s2")
    [result] = run_until_blocked(late, fast_forward=True)
    assert (result.status, result.error.split(":")[0]) == ("failed", "BudgetExceededError")


@pytest.mark.django_db
def test_the_wait_for_a_handler_that_may_be_at_work_is_skipped(effects: Effects) -> None:
    @tool(timeout=30, reconcile=lambda ctx, args: Occurred("it went out"))
    def send(ctx: ToolContext) -> str:
        """Send it."""
        return act("send", ctx)

    agent = shop_agent("sends", {"tools": [call("send")]}, tools=[send])
    with crashing_at("after_tool"):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    expire_leases()
    assert [result.status for result in run_until_blocked()] == ["queued"]
    [result] = run_until_blocked(fast_forward=True)
    assert (result.status, effects.count(), outcomes(the_run(result))) == ("completed", 1, ["ok"])


# The clock


@pytest.mark.django_db
def test_the_database_django_and_the_engine_see_one_time(
    database_clock: DatabaseClock, settings: Any
) -> None:
    before = database_clock.now
    database_clock.forward(timedelta(hours=1), minutes=5)
    assert database_clock.now == before + timedelta(minutes=65) == timezone.now()
    with crashing_at("after_tool"):
        run_agent("calls-post", "do it", "s1", idempotency_key="k")
    run = Run.objects.get()
    written = Message.objects.values_list("created_at", Now()).latest("seq")
    assert {*written, run.created_at} == {database_clock.now}
    assert run.lease_expires_at == database_clock.now + timedelta(seconds=settings.AGENTRUNS_LEASE_SECONDS)
    database_clock.forward(seconds=settings.AGENTRUNS_LEASE_SECONDS)
    with pytest.raises(StillRunning):
        run_until_blocked()
    database_clock.forward(seconds=1)
    assert [result.status for result in run_until_blocked()] == ["orphaned"]
    with pytest.raises(ValueError, match="never goes back"):
        database_clock.forward(seconds=-1)


@pytest.mark.django_db
def test_an_approval_expires_a_back_off_ends_and_afterwards_time_goes_on(
    effects: Effects, settings: Any
) -> None:
    settings.AGENTRUNS_APPROVAL_EXPIRES = timedelta(days=1)
    answers = iter([busy])
    turn = lambda request: next(answers, lambda request: {"text": "at last"})(request)  # noqa: E731
    with frozen_clock() as clock, frozen_clock() as same:
        assert same is clock
        run = start_run("calls-refund", "do it", "s1", idempotency_key="k")
        start_run(shop_agent("patient", turn), "do it", "s2", idempotency_key="k2")
        run_until_blocked()
        clock.forward(seconds=89)
        assert run_until_blocked() == []
        clock.forward(minutes=5)
        assert [result.output for result in run_until_blocked()] == ["at last"]
        clock.forward(hours=23)
        with pytest.raises(ApprovalStateError, match="expired"):
            clock.forward(hours=1)
            approve(Approval.objects.get().pk, None)
        [result] = run_until_blocked()
        assert (result.status, effects.count(), outcomes(run)) == ("completed", 0, ["expired"])
        the_run(result)
        clock.forward(days=1000)
    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    seen = Order.objects.values_list(Now(), flat=True).get()
    assert max(seen, timezone.now()) < clock.now - timedelta(days=999)


# The ledger and the script


def test_a_ledger_counts_and_is_missed_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRUNS_EFFECTS", raising=False)
    with pytest.raises(LookupError, match="effects"):
        EffectsLedger.from_environment()
    monkeypatch.setenv("AGENTRUNS_EFFECTS", str(tmp_path / "ledger"))
    ledger = EffectsLedger.from_environment()
    assert (ledger.lines(), ledger.count(), ledger.count("a")) == ([], 0, 0)
    for key in ("a", "b", "a"):
        ledger.record(key, path=tmp_path)
    assert (ledger.counts(), ledger.repeated(), ledger.count("a")) == ({"a": 2, "b": 1}, ["a"], 2)
    assert ledger.lines()[1] == {"key": "b", "path": str(tmp_path)}


@pytest.mark.django_db
def test_a_script_leaves_the_definition_as_it_is(scripted_model: Any) -> None:
    agent = shop_agent("served")
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    script = scripted_model("served", [{"text": "nothing to do"}])
    [result] = run_until_blocked()
    assert (result.output, run.definition_id) == ("nothing to do", Run.objects.get().definition_id)
    assert [request.model for request in script.requests] == [agent.definition()["model"]]


# A host project, in processes of its own

SETTINGS = """
from pathlib import Path
BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "only for tests"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(BASE_DIR / "db.sqlite3")}}
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "agentruns", "shop"]
"""
AGENTS = """
from agentruns import Agent
from agentruns.testing import ScriptedModel
Agent("support", instructions="Help.", model=ScriptedModel([{"text": "Hello."}]))
"""
FLUSHED = """
import pytest
from django.core.management import call_command
from django.db import DatabaseError
from django.test import TransactionTestCase
from agentruns import run_agent
from agentruns.models import Message

def says_hello():
    assert Message.objects.count() == 0
    assert run_agent("support", "Hi", "s1", idempotency_key="k").output == "Hello."

class OldTest(TransactionTestCase):
    def test_first(self):
        says_hello()
    def test_second(self):
        says_hello()

@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("time", [1, 2])
def test_after_it(time):
    says_hello()
    call_command("flush", interactive=False, verbosity=0)
    says_hello()
    with pytest.raises(DatabaseError, match="append-only"):
        Message.objects.all().delete()

@pytest.mark.django_db(transaction=True)
def test_nobody_else_sees_a_database_in_memory(manage_py):
    with pytest.raises(RuntimeError, match="in memory"):
        manage_py("resume_runs")
"""


@pytest.fixture
def host(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with agentruns and an app, and nothing of this repository's settings."""
    for name in ("DJANGO_SETTINGS_MODULE", "AGENTRUNS_CRASH_AT"):
        monkeypatch.delenv(name, raising=False)
    write(pytester, "config/settings.py", SETTINGS)
    write(pytester, "shop/agents.py", AGENTS)
    for package in ("config", "shop", "tests"):
        write(pytester, f"{package}/__init__.py", "")
    pytester.makeini("[pytest]\nDJANGO_SETTINGS_MODULE = config.settings\nfilterwarnings = error\n")
    others = {plugin.name for plugin in entry_points(group="pytest11")} - {"agentruns", "django", "xdist"}
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in sorted(others)))
    return pytester


def write(pytester: pytest.Pytester, path: str, text: str) -> None:
    file = pytester.path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_every_example_of_the_page_runs_also_under_xdist(host: pytest.Pytester) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    for path in {block.splitlines()[0].removeprefix("# ") for block in blocks}:
        assert path.endswith(".py"), f"A block does not say where it goes: {path}"
        write(host, path, "".join(block for block in blocks if block.startswith(f"# {path}\n")))
    tests = len(re.findall(r"^ *def test_", "".join(blocks), re.MULTILINE))
    assert tests >= 10
    result = host.runpytest_subprocess("-n", "1", "--ds=config.test_settings")
    result.assert_outcomes(passed=tests)


def test_a_project_flushes_the_journal_and_keeps_fixtures_of_our_names(host: pytest.Pytester) -> None:
    plugin = (ROOT / "agentruns/testing/pytest_plugin.py").read_text()
    names = re.findall(r"@pytest\.fixture\ndef (\w+)|= _function\(\s*\"(\w+)\"", plugin)
    names = [own or of_a_function for own, of_a_function in names]
    assert len(names) >= 9
    own = "".join(f"@pytest.fixture\ndef {name}():\n    return 'mine'\n" for name in names)
    asked = ", ".join(names)
    write(host, "own/conftest.py", f"import pytest\n{own}")
    write(host, "own/test_own.py", f"def test_own({asked}):\n    assert {{{asked}}} == {{'mine'}}\n")
    write(host, "tests/test_flushed.py", FLUSHED)
    host.runpytest_subprocess().assert_outcomes(passed=6)

    without = host.runpytest_subprocess("-p", "no:agentruns", "-k", "OldTest")
    without.stdout.fnmatch_lines(["*append-only*"])


UNUSED = """
import sys
HEAVY = {"django.db", "agentruns.models", "agentruns.journal", "agentruns.testing.runs", "pydantic"}
def check():
    assert "agentruns.testing.pytest_plugin" in sys.modules
    assert not HEAVY & set(sys.modules), HEAVY & set(sys.modules)
"""


def test_without_django_the_plugin_loads_nothing_and_does_nothing(host: pytest.Pytester) -> None:
    host.makeini("[pytest]\n")
    write(host, "unused.py", UNUSED)
    write(host, "tests/test_plain.py", "from unused import check\ndef test_plain():\n    check()\n")
    write(host, "conftest.py", "from unused import check\ndef pytest_unconfigure():\n    check()\n")
    host.runpytest_subprocess("tests").assert_outcomes(passed=1)
