"""Several decisions at once: all calls of a reply on one page, or a selection of the list."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import Agent, approve, ask_human, deny, run_agent, tool
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.pages import read, snapshot
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.effects import Effects
from tests.shop.agents import call, refund

pytestmark = pytest.mark.django_db
LIST = "admin:agentruns_approval_changelist"


def three(world: World) -> list[Approval]:
    agent = Agent(
        "three",
        instructions="Ask.",
        tools=[refund, ask_human],
        model=ScriptedModel(
            [
                {
                    "text": "Please.",
                    "tools": [
                        call("refund", cents=5000),
                        call("refund", cents=6000),
                        call("ask_human", question="Which colour?"),
                    ],
                }
            ]
        ),
    )
    return run_agent(agent, "go", "three").pending


def paid(cents: int) -> str:
    """Pay."""
    return "paid"


def turn(approval: Approval) -> str:
    return reverse("admin:agentruns_approval_turn", args=[approval.run_id])


def ticked(verb: str, *approvals: Approval, reason: str = "") -> dict[str, Any]:
    """Return what the page of a reply sends."""
    sent: dict[str, Any] = {f"digest-{one.pk}": one.digest for one in approvals}
    return {**sent, "_selected_action": [str(one.pk) for one in approvals], "verb": verb, "reason": reason}


def statuses() -> list[str]:
    return [one.status for one in Approval.objects.order_by("requested_at", "id")]


def test_a_whole_reply_is_decided_on_one_page(world: World, effects: Effects) -> None:
    first, second, question = three(world)
    client = browser("decider")
    page = read(client.get(turn(first)))
    for text in (
        first.title,
        second.title,
        "Which colour?",
        "Please.",
        "A question is answered, not approved.",
    ):
        assert text in page.text
    html = client.get(turn(first)).content.decode()
    assert html.count(" checked>") == 2, "those that can be approved are ticked"
    response = client.post(turn(first), ticked("approve", first), follow=True)
    assert "Approved. A worker runs the call." in read(response).text
    response = client.post(turn(first), ticked("deny", second, question, reason="too much"), follow=True)
    assert read(response).text.count("Denied. The call is not run") == 2
    assert statuses() == ["approved", "denied", "denied"]
    sweep()
    assert [line["cents"] for line in effects.lines()] == [5000]
    assert LogEntry.objects.count() == 3


def test_all_of_one_tool_are_counted_and_added_up(world: World) -> None:
    names = tool(name="refund", requires_approval=True, sensitive=["secret"])(pay)
    reply = {"tools": [call("refund", cents=5000 + n, secret=n) for n in range(3)]}
    agent = Agent("adder", instructions="Pay.", tools=[names], model=ScriptedModel([reply]))
    page = read(browser("decider").get(turn(run_agent(agent, "go", "sum").pending[0])))
    assert "3 calls can be ticked, amount 150.03 in total" in " ".join(page.text.split())
    assert "secret 3" not in page.text, "no sum of what is masked"
    assert "in total" not in read(browser("decider").get(turn(three(world)[0]))).text, "of several tools none"


@pytest.mark.parametrize(
    ("sentences", "total"),
    [
        (["Refund 1,500.00 EUR of order 3", "Refund 0.50 EUR"], "amount 1,500.50 EUR in total"),
        (["Refund €1500.00", "Refund €0.50"], "amount 1,500.50 € in total"),
        (["Refund 1,500.00 EUR", "Refund 0.50 USD"], ""),
        (["Refund 1,500.00 EUR", "Refund 10.50 USD"], ""),
        (["Refund 1,500.00 of FOO", "Refund 0.50"], "amount 1,500.50 in total"),
    ],
)
def test_a_sum_has_the_currency_of_the_sentences_and_never_two(
    world: World, sentences: list[str], total: str
) -> None:
    said = dict(zip((150000, 50), sentences, strict=True))
    names = tool(name="refund", requires_approval=True, describe=lambda given: said[given["cents"]])(paid)
    reply = {"tools": [call("refund", cents=cents) for cents in said]}
    agent = Agent("adder", instructions="Pay.", tools=[names], model=ScriptedModel([reply]))
    text = " ".join(read(browser("decider").get(turn(run_agent(agent, "go", "sum").pending[0]))).text.split())
    assert f"2 calls can be ticked, {total}" in text if total else "in total" not in text


def test_what_is_warned_of_starts_unticked_where_it_is_approved(world: World) -> None:
    def warned(given: dict[str, Any]) -> dict[str, Any]:
        return {"warnings": ["more than was paid"] if given["cents"] > 5000 else []}

    names = tool(name="refund", requires_approval=True, preview=warned)(paid)
    reply = {"tools": [call("refund", cents=cents) for cents in (5000, 6000)]}
    agent = Agent("careful", instructions="Pay.", tools=[names], model=ScriptedModel([reply]))
    low, high = run_agent(agent, "go", "careful").pending

    def ticks(response: Any) -> list[bool]:
        html = response.content.decode()
        return [f'value="{one.pk}" aria-label="{one.title}" checked>' in html for one in (low, high)]

    assert ticks(browser("superuser").get(turn(low))) == [True, False]
    assert ticks(select("approve", low, high)) == [True, False], "the list's ticks only bring them here"
    assert ticks(select("deny", low, high)) == [True, True]
    again = select("deny", high, **{**confirmed(low, high), "reason": ""})
    assert ticks(again) == [False, True], "but those of this page stay"


def test_the_note_says_only_what_is_true_of_its_page(world: World) -> None:
    approval = world.waiting()
    approving, denying = read(select("approve", approval)).text, read(select("deny", approval)).text
    assert "Note, kept in the journal:" in approving
    assert "tells it to the model" not in approving
    assert "Note, kept in the journal and told to the model:" in denying
    assert "Deny tells it to the model" in read(browser("decider").get(turn(approval))).text


def pay(cents: int, secret: int) -> str:
    """Pay."""
    return "paid"


def test_what_is_left_for_later_stays_and_the_page_with_it(world: World) -> None:
    first, _second, _question = three(world)
    response = browser("superuser").post(turn(first), ticked("approve", first))
    assert response.url == turn(first)
    assert Approval.objects.pending().count() == 2


def test_what_misses_something_decides_nothing_and_keeps_what_was_ticked(world: World) -> None:
    first, second, question = three(world)
    before = snapshot()
    for sent, told in (
        (ticked("deny", first, reason=" "), "A denial needs a reason"),
        (ticked("nonsense", first), "Nothing was decided: tick at least one call."),
        (ticked("approve"), "Nothing was decided: tick at least one call."),
        (
            {"verb": "approve", "_selected_action": ["nonsense"]},
            "Nothing was decided: tick at least one call.",
        ),
    ):
        response = browser("superuser").post(turn(first), sent)
        assert response.status_code == 400
        assert told in read(response).text
        assert snapshot() == before
    html = browser("superuser").post(turn(first), ticked("deny", second, reason="")).content.decode()
    assert html.count(" checked>") == 1
    response = browser("superuser").post(turn(first), ticked("approve", question), follow=True)
    assert "there is nothing to execute" in read(response).text
    assert snapshot() == before


def test_a_row_decided_elsewhere_meanwhile_stops_no_other(world: World) -> None:
    first, second, question = three(world)
    approve(first.pk, None, arguments={"cents": 5500}, digest=first.digest)
    stale = Approval(pk=second.pk, digest="0" * 64)
    response = browser("superuser").post(
        turn(first), ticked("deny", stale, question, reason="no"), follow=True
    )
    text = read(response).text
    assert "Your decision was not recorded." in text
    assert "were edited since you looked" in text
    assert "Denied." in text
    assert statuses() == ["approved", "pending", "denied"]


def test_nothing_left_or_no_such_run(world: World) -> None:
    approval = world.waiting()
    deny(approval.pk, None, "no")
    client = browser("superuser")
    response = client.get(turn(approval), follow=True)
    assert "Nothing of this run waits for a decision." in read(response).text
    assert client.get(reverse("admin:agentruns_approval_turn", args=["nonsense"])).status_code == 404


def select(verb: str, *approvals: Approval, role: str = "superuser", **data: Any) -> Any:
    chosen = {"action": f"{verb}_selected", "_selected_action": [str(one.pk) for one in approvals], **data}
    return browser(role).post(reverse(LIST), chosen)


def confirmed(*approvals: Approval) -> dict[str, str]:
    return {"confirmed": "1", "reason": "no", **{f"digest-{one.pk}": one.digest for one in approvals}}


def test_a_selection_is_listed_before_it_is_decided(world: World, effects: Effects) -> None:
    chosen = [world.waiting(f"s{number}", 5000 + number) for number in range(3)]
    left_out, before = world.waiting("other"), snapshot()
    page = read(select("approve", *chosen, select_across="1", index="0"))
    assert snapshot() == before
    assert "3 calls can be ticked, amount 150.03 in total" in page.text
    assert page.text.count("refund the lamp · requested by") == 3, "each names its task"
    assert "2 calls" in read(select("approve", *three(world))).text, "a question is left out"
    assert all(str(5000 + number) in page.text for number in range(3))
    assert left_out.run.session.key not in page.text
    page = read(select("approve", *chosen, **confirmed(*chosen)))
    assert "3 decisions were recorded." in page.text
    assert sweep().completed == 3
    assert sorted(line["cents"] for line in effects.lines()) == [5000, 5001, 5002]
    left_out.refresh_from_db()
    assert left_out.status == "pending"


def test_denying_several_needs_one_reason(world: World) -> None:
    chosen, before = [world.waiting("a"), world.waiting("b", 6000)], None
    before = snapshot()
    response = select("deny", *chosen, **{**confirmed(*chosen), "reason": " "})
    assert response.status_code == 400
    assert "A denial needs a reason" in read(response).text
    assert snapshot() == before
    read(select("deny", *chosen, **{**confirmed(*chosen), "reason": "month is over"}))
    assert set(Approval.objects.values_list("status", "reason")) == {("denied", "month is over")}


def response_count(page: Any) -> int:
    """Return how many calls can be ticked."""
    return page.html.count('type="checkbox" name="_selected_action"')


def test_each_row_has_its_own_outcome(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    fine, gone, edited = world.waiting("fine"), world.waiting("gone", 6000), world.waiting("edited", 7000)
    own = world.waiting("own", 8000, actor=user("decider"))
    question = three(world)[2]
    listed = [fine, gone, edited, own, question]
    page = read(select("approve", *listed, role="decider"))
    assert response_count(page) == 3
    assert "requesters may not decide about their own" in page.text
    assert "A question is answered, not approved." in page.text
    deny(gone.pk, user("superuser"), "no")
    approve(edited.pk, user("superuser"), arguments={"cents": 7500}, digest=edited.digest)
    page = read(select("approve", *listed, role="decider", **confirmed(*listed)))
    assert "1 decision was recorded." in page.text
    assert "Denied by superuser on" in page.text
    assert "Approved by superuser on" in page.text
    statuses = {one.pk: one.status for one in Approval.objects.all()}
    assert [statuses[one.pk] for one in listed] == ["approved", "denied", "approved", "pending", "pending"]
    assert statuses[edited.pk] == "approved"


def test_what_was_not_on_the_page_is_not_decided(world: World) -> None:
    shown, sneaked = world.waiting("shown"), world.waiting("sneaked", 6000)
    page = read(select("approve", shown, sneaked, **confirmed(shown)))
    assert "It was not on the page." in page.text
    sneaked.refresh_from_db()
    assert sneaked.status == "pending"


def test_a_reload_of_the_outcome_decides_nothing_again(world: World) -> None:
    approval = world.waiting()
    select("approve", approval, **confirmed(approval))
    before = snapshot()
    page = read(select("approve", approval, **confirmed(approval)))
    assert "0 decisions were recorded." in page.text
    assert "Approved by superuser on" in page.text
    assert snapshot() == before


def test_a_viewer_has_no_actions(world: World) -> None:
    world.waiting()
    assert "Approve selected" not in read(browser("viewer").get(reverse(LIST))).text


def test_a_decision_that_lost_the_race_is_told_who_won(world: World) -> None:
    first, _second, _question = three(world)
    approve(first.pk, user("decider"))
    sent = ticked("deny", first, reason="fraud!")
    text = read(browser("superuser").post(turn(first), sent, follow=True)).text
    assert "Your decision was not recorded. Approved by decider on" in text


@pytest.mark.parametrize("across", ["0", "1"])
def test_nonsense_is_no_selection(world: World, across: str) -> None:
    world.waiting()
    before = snapshot()
    sent = {"action": "approve_selected", "_selected_action": ["nonsense"], "select_across": across}
    response = browser("superuser").post(reverse(LIST), sent, follow=True)
    assert "Nothing was decided: choose from the list." in read(response).text
    assert snapshot() == before


def test_select_all_says_that_only_the_page_is_decided(world: World) -> None:
    approval = world.waiting()
    page = read(select("approve", approval, select_across="1", index="0"))
    assert "Only what was on the page is decided: 1." in page.text


@pytest.mark.parametrize("names", [["refund"], ["refund", "transfer"]])
def test_more_cards_cost_no_more_queries(world: World, names: list[str]) -> None:
    """One more for each further tool: whether it was called like that before."""
    tools = [tool(name=name, requires_approval=True, approvers="owners")(paid) for name in names]

    def costs(session: str, count: int) -> tuple[int, int]:
        reply = {"tools": [call(names[n % len(names)], cents=5000 + n) for n in range(count)]}
        model = ScriptedModel([reply])
        agent = Agent(f"payer-{session}", instructions="Pay.", tools=tools, model=model)
        cards, client = run_agent(agent, "go", session).pending, browser("decider")
        with CaptureQueriesContext(connection) as page:
            assert client.get(turn(cards[0])).status_code == 200
        sent = {"action": "approve_selected", "_selected_action": [str(card.pk) for card in cards]}
        with CaptureQueriesContext(connection) as selection:
            assert client.post(reverse(LIST), sent).status_code == 200
        return len(page), len(selection)

    few, many = costs("few", len(names)), costs("many", 20)
    assert few == many
    assert few[0] <= 15 + len(names)
