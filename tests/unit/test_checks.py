from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.core.checks import WARNING, run_checks
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from agentruns import Policy
from agentruns.agents.agent import Agent
from agentruns.checks.agents import check_agents, check_approvers
from agentruns.checks.database import check_database
from agentruns.checks.deployment import check_deployment, check_dispatcher, check_sweeper
from agentruns.checks.settings import check_payload_storage, check_policy, check_settings
from tests.unit.checks import ids, refund, wire

pytestmark = pytest.mark.django_db


def test_the_settings_of_the_tests_are_fine() -> None:
    assert [check(None) for check in (check_settings, check_deployment, check_dispatcher)] == [[], [], []]
    assert ids(check_database(None, databases=["default"])) == []


def test_asking_a_database_is_quick() -> None:
    """A few questions, however much there is: the longest are about tools that two groups approve."""
    for number in range(5):
        Agent(f"gated-{number}", instructions="", model="claude-sonnet-5-5", tools=[wire, refund])
    connection = connections["default"]
    with CaptureQueriesContext(connection) as asked:
        for check in (check_database, check_approvers, check_sweeper):
            check(None, databases=["default"])
    assert len(asked) <= 14, [query["sql"] for query in asked]
    with CaptureQueriesContext(connection) as asked:
        for check in (check_database, check_approvers, check_sweeper):
            assert check(None, databases=None) == check(None, databases=["other"]) == []
    assert len(asked) == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"AGENTRUNS_LEASE_SECOND": 5}, "agentruns.W001"),
        ({"AGENTRUNS_LEASE_SECONDS": 10, "AGENTRUNS_HEARTBEAT_SECONDS": 9}, "agentruns.E001"),
        ({"USE_TZ": False}, "agentruns.E002"),
        ({"AGENTRUNS_DATABASE": "nowhere"}, "agentruns.E003"),
        ({"AGENTRUNS_PRICES": {"claude-sonnet-5-5": {"input": 3}}}, "agentruns.E007"),
        ({"AGENTRUNS_PRICES": None}, "agentruns.E007"),
    ],
)
def test_a_setting_that_breaks_the_promise_is_found(changed: dict[str, Any], expected: str) -> None:
    with override_settings(**changed):
        (found,) = check_settings(None)
    assert found.id == expected
    assert found.hint


def test_a_new_project_hears_of_the_storage_when_it_is_deployed() -> None:
    without = {name: one for name, one in settings.STORAGES.items() if name != "agentruns"}
    with override_settings(STORAGES=without):
        assert "agentruns.W005" not in ids(run_checks())
        found = [one for one in run_checks(include_deployment_checks=True) if one.id == "agentruns.W005"]
        assert found == check_payload_storage(None)
        assert "docs/" not in str(found[0].hint)
        with override_settings(AGENTRUNS_PAYLOAD_STORAGE=""):
            assert check_payload_storage(None) == []


def test_every_wrong_price_is_told_by_its_name() -> None:
    with override_settings(AGENTRUNS_PRICES={"a": {}, "b": {"input": -1, "output": 1}}):
        assert ids(found := check_settings(None)) == ["agentruns.E007"] * 2
        assert ["'a'" in found[0].msg, "'b'" in found[1].msg] == [True, True]
        assert check_agents(None) == []  # one mistake, said once


def test_an_agent_whose_cost_nobody_can_know_is_found() -> None:
    Agent("thrifty", instructions="Save.", model="claude-sonnet-5-5", cost_budget=1)
    Agent("generous", instructions="Spend.", model="claude-sonnet-5-5")
    (found,) = check_agents(None)
    assert (found.id, found.level) == ("agentruns.W003", WARNING)
    assert "thrifty" in found.msg
    assert "claude-sonnet-5-5" in found.msg
    with override_settings(AGENTRUNS_PRICES={"claude-sonnet-5-5": {"input": 3, "output": 15}}):
        assert check_agents(None) == check_settings(None) == []


@pytest.mark.parametrize(
    ("vendor", "facts", "expected"),
    [
        ("mysql", {}, "agentruns.E004"),
        (None, {"AUTOCOMMIT": False}, "agentruns.E005"),
        ("sqlite", {"OPTIONS": {}}, "agentruns.W002"),
    ],
)
def test_a_database_that_breaks_the_promise_is_found(
    vendor: str | None, facts: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections["default"]
    if vendor == "sqlite" != connection.vendor:
        pytest.skip("only SQLite has transaction modes")
    monkeypatch.setattr(type(connection), "vendor", vendor or connection.vendor)
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", True)
    for name, value in facts.items():
        monkeypatch.setitem(connection.settings_dict, name, value)
    (found,) = check_database(None, databases=["default"])
    assert found.id == expected
    assert found.hint
    assert check_database(None, databases=None) == []


def test_a_server_that_keeps_the_locks_of_what_hangs_is_found() -> None:
    connection = connections["default"]
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no server: the locks of a process end with it")
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    (found,) = check_database(None, databases=["default"])
    assert (found.id, found.level) == ("agentruns.W014", WARNING)


def test_a_database_that_forgets_is_found() -> None:
    connection = connections["default"]
    off = {
        "sqlite": "PRAGMA synchronous=OFF",
        "postgresql": "SET LOCAL synchronous_commit = off",
    }[connection.vendor]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("COMMIT")  # SQLite refuses the change inside a transaction
        cursor.execute(off)
    try:
        assert ids(check_database(None, databases=["default"])) == ["agentruns.E006"]
    finally:
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA synchronous=FULL")
                cursor.execute("BEGIN")


class Mistyped(Policy):
    def can_decides(self, user: Any, approval: Any, arguments: Any) -> bool:
        """Be asked by nobody."""
        return False

    def _helper(self) -> None:
        """Help."""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("agentruns.Policy", []),
        ("nowhere.Policy", ["agentruns.E018"]),
        ("agentruns.Agent", ["agentruns.E018"]),
        (f"{__name__}.Mistyped", ["agentruns.W015"]),
    ],
)
def test_the_policy_is_one_and_all_its_methods_are_asked(path: str, expected: list[str]) -> None:
    with override_settings(AGENTRUNS_POLICY=path):
        assert ids(check_policy(None)) == expected


def test_the_setting_that_the_policy_replaces_is_unknown() -> None:
    with override_settings(AGENTRUNS_CAN_DECIDE="shop.rules.can_decide"):
        assert ids(check_settings(None)) == ["agentruns.W001"]
