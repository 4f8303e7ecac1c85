"""`list_rules`, `backtest_rule` and `stop_rule`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentruns import approve, deny
from agentruns.services import backtest, rules
from tests.commands.running import run
from tests.db.helpers import user
from tests.db.ruled import payer, ran, rule
from tests.effects import Effects
from tests.registry import isolated_registry

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _registry_of_its_own() -> Iterator[None]:
    with isolated_registry():
        yield


def test_rules_are_listed_with_what_they_do() -> None:
    assert "no such rules" in run("list_rules").out
    payer(500)
    rule()
    rule(name="other", active=False, scope="acme")
    out = run("list_rules").out
    assert "small:1" in out
    assert "Approve pay if cents is at most 5000." in out
    assert [each["name"] for each in run("list_rules", "--status", "draft", "--json").lines] == ["other"]
    assert run("list_rules", "--agent", "nobody", "--json").lines == []


def test_a_backtest_counts_and_names_the_disagreements(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backtest, "AT_ONCE", 1)
    payer(500)
    one, two = (ran(key).approvals.get() for key in ("s1", "s2"))
    approve(one.pk, None)
    deny(two.pk, None, "no")
    rule(active=False)
    done = run("backtest_rule", "small:1")
    assert "1 cards …" in done.out
    assert f"Approval {two.pk}: denied." in done.out
    assert "2 cards, of which rule small:1 fits 2. People agreed in 1 and disagreed in 1." in done.out
    (counts,) = run("backtest_rule", "small", "--json").lines
    assert (counts["tried"], counts["agreed"], counts["disagreements"]) == (2, 1, [[str(two.pk), "denied"]])
    assert run("backtest_rule", "small", "--limit", "1", "--json").lines[0]["tried"] == 1


def test_a_rule_is_stopped_by_its_name() -> None:
    payer(500)
    made = rule()
    rule(active=False)
    user("nobody")
    assert run("stop_rule", "small:3").code == 2
    assert run("stop_rule", "small", "--scope", "acme").code == 2
    assert run("stop_rule", "small", "--user", "nobody").code == 1
    done = run("stop_rule", "small", "--reason", "wrong")
    assert (done.code, done.out) == (0, "Rule small:1 is stopped.\n"), "the active version"
    made.refresh_from_db()
    assert (made.status, made.why, made.changes.all()[0].actor_name) == ("stopped", "wrong", "stop_rule")
    assert run("stop_rule", "small:1").code == 1
    assert rules.list_rules().count() == 2
