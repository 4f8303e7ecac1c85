"""Several decisions at once: all calls of a reply on one page, or a selection of the list."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from agentruns import approve, ask_human, deny, run_agent, tool
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, listed, queries, read, says, unchanged, words
from tests.admin.people import browser, user
from tests.admin.world import World, asked
from tests.effects import Effects
from tests.shop.agents import call, refund, shop_agent

pytestmark = pytest.mark.django_db
LIST = reverse("admin:agentruns_approval_changelist")
CANNOT = "A question is answered, not approved."


@pytest.fixture
def three(db: None) -> list[Approval]:
    """Two refunds and a question, of one reply."""
    asks = call("ask_human", question="Which colour?")
    calls = [call("refund", cents=5000), call("refund", cents=6000), asks]
    agent = shop_agent("three", {"text": "Please.", "tools": calls}, tools=[refund, ask_human])
    return run_agent(agent, "go", "three").pending


def paid(cents: int) -> str:
    """Pay."""
    return "paid"


def turn(approval: Approval) -> str:
    return reverse("admin:agentruns_approval_turn", args=[approval.run_id])


def page_of(approval: Approval, role: str = "decider") -> Page:
    return says(browser(role).get(turn(approval)))


def ticked(verb: str, *approvals: Approval, role: str = "superuser", reason: str = "", **more: Any) -> Any:
    """Send what the page of a reply sends."""
    sent: dict[str, Any] = {f"digest-{one.pk}": one.digest for one in approvals}
    sent |= {"_selected_action": [str(one.pk) for one in approvals], "verb": verb, "reason": reason}
    return browser(role).post(turn(approvals[0]), {**sent, **more}, follow=True)


def select(verb: str, *approvals: Approval, role: str = "superuser", **data: Any) -> Any:
    chosen = {"action": f"{verb}_selected", "_selected_action": [str(one.pk) for one in approvals], **data}
    return browser(role).post(LIST, chosen)


def confirmed(*approvals: Approval) -> dict[str, str]:
    return {"confirmed": "1", "reason": "no", **{f"digest-{one.pk}": one.digest for one in approvals}}


def statuses(*approvals: Approval) -> list[str]:
    found = Approval.objects.in_bulk([one.pk for one in approvals])
    return [found[one.pk].status for one in approvals]


def test_a_whole_reply_is_decided_on_one_page(three: list[Approval], effects: Effects) -> None:
    first, second, question = three
    page = page_of(first)
    for text in (first.title, second.title, "Which colour?", "Please.", CANNOT):
        assert text in page.text
    assert page.html.count(" checked>") == 2, "those that can be approved are ticked"
    assert "in total" not in page.text, "no sum of several tools"
    answer = ticked("approve", first, role="decider")
    says(answer, "Approved. A worker runs the call.")
    assert answer.redirect_chain[0][0] == turn(first), "what is left for later stays, and the page with it"
    assert statuses(*three) == ["approved", "pending", "pending"]
    answer = ticked("deny", second, question, role="decider", reason="too much")
    assert read(answer).text.count("Denied. The call is not run") == 2
    assert statuses(*three) == ["approved", "denied", "denied"]
    sweep()
    assert [line["cents"] for line in effects.lines()] == [5000]
    assert LogEntry.objects.count() == 3
    says(browser("superuser").get(turn(first), follow=True), "Nothing of this run waits for a decision.")
    nowhere = reverse("admin:agentruns_approval_turn", args=["nonsense"])
    assert browser("superuser").get(nowhere).status_code == 404


def test_all_of_one_tool_are_added_up_in_the_currency_of_the_sentences_and_never_two(world: World) -> None:
    @tool(name="refund", requires_approval=True, sensitive=["secret"])
    def pay(cents: int, secret: int) -> str:
        """Pay."""
        return "paid"

    cards = asked(*(call("refund", cents=5000 + n, secret=n) for n in range(3)), name="masked", tools=[pay])
    page = page_of(cards[0])
    assert "3 calls can be ticked, amount 150.03 in total" in words(page)
    assert "secret 3" not in page.text, "no sum of what is masked"
    for number, (sentences, total) in enumerate((
        (["Refund 1,500.00 EUR of order 3", "Refund 0.50 EUR"], "amount 1,500.50 EUR in total"),
        (["Refund €1500.00", "Refund €0.50"], "amount 1,500.50 € in total"),
        (["Refund 1,500.00 EUR", "Refund 0.50 USD"], ""),
        (["Refund 1,500.00 EUR", "Refund 10.50 USD"], ""),
        (["Refund 1,500.00 of FOO", "Refund 0.50"], "amount 1,500.50 in total"),
    )):  # fmt: skip
        said = dict(zip((150000, 50), sentences, strict=True))
        told = tool(name="refund", requires_approval=True, describe=lambda given, s=said: s[given["cents"]])
        cards = asked(*(call("refund", cents=one) for one in said), name=f"s{number}", tools=[told(paid)])
        text = words(page_of(cards[0]))
        assert f"2 calls can be ticked, {total}" in text if total else "in total" not in text


def test_what_is_warned_of_starts_unticked_where_it_is_approved(world: World) -> None:
    def warned(given: dict[str, Any]) -> dict[str, Any]:
        return {"warnings": ["more than was paid"] if given["cents"] > 5000 else []}

    made = tool(name="refund", requires_approval=True, preview=warned)(paid)
    low, high = asked(*(call("refund", cents=one) for one in (5000, 6000)), tools=[made])

    def ticks(response: Any) -> list[bool]:
        html = response.content.decode()
        return [f'value="{one.pk}" aria-label="{one.title}" checked>' in html for one in (low, high)]

    assert ticks(browser("superuser").get(turn(low))) == [True, False]
    approving, denying = select("approve", low, high), select("deny", low, high)
    assert ticks(approving) == [True, False], "the list's ticks only bring them here"
    assert ticks(denying) == [True, True]
    again = select("deny", high, **{**confirmed(low, high), "reason": ""})
    assert ticks(again) == [False, True], "but those of this page stay"
    # The note says only what is true of its page.
    assert "tells it to the model" not in says(approving, "Note, kept in the journal:").text
    says(denying, "Note, kept in the journal and told to the model:")
    assert "Deny tells it to the model" in page_of(low).text


def test_what_misses_something_or_was_decided_elsewhere_keeps_what_was_ticked(three: list[Approval]) -> None:
    first, second, question = three
    none = "Nothing was decided: tick at least one call."
    with unchanged():
        says(ticked("deny", first, reason=" "), "A denial needs a reason", status=400)
        says(ticked("nonsense", first), none, status=400)
        for chosen in ([], ["nonsense"]):
            says(ticked("approve", first, _selected_action=chosen), none, status=400)
        assert ticked("deny", second).content.decode().count(" checked>") == 1
        says(ticked("approve", question), "there is nothing to execute")
    approve(first.pk, user("decider"))
    told = "Your decision was not recorded. Approved by decider on"
    says(ticked("deny", first, reason="fraud!"), told)
    second.digest = "0" * 64
    answer = ticked("deny", second, question, reason="no")
    says(answer, "Your decision was not recorded.", "were edited since you looked", "Denied.")
    assert statuses(*three) == ["approved", "pending", "denied"]


def test_a_selection_is_listed_then_decided(world: World, three: list[Approval], effects: Effects) -> None:
    chosen = [world.waiting(f"s{number}", 5000 + number) for number in range(3)]
    left_out = world.waiting("other")
    with unchanged():
        page = read(select("approve", *chosen, select_across="1", index="0"))
        assert "2 calls" in read(select("approve", *three)).text, "a question is left out"
    assert "3 calls can be ticked, amount 150.03 in total" in page.text
    assert "Only what was on the page is decided: 3." in page.text
    assert page.text.count("refund the lamp · requested by") == 3, "each names its task"
    assert all(str(5000 + number) in page.text for number in range(3))
    assert left_out.run.session.key not in page.text
    says(select("approve", *chosen, **confirmed(*chosen)), "3 decisions were recorded.")
    with unchanged():  # a reload of the outcome decides nothing again
        again = select("approve", *chosen, **confirmed(*chosen))
        says(again, "0 decisions were recorded.", "Approved by superuser on")
    assert sweep().completed == 3
    assert sorted(line["cents"] for line in effects.lines()) == [5000, 5001, 5002]
    assert statuses(left_out) == ["pending"]


def test_each_row_has_its_own_outcome(world: World, three: list[Approval], settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    fine, gone, edited = world.waiting("fine"), world.waiting("gone", 6000), world.waiting("edited", 7000)
    own = world.waiting("own", 8000, actor=user("decider"))
    chosen = [fine, gone, edited, own, three[2]]
    page = says(
        select("approve", *chosen, role="decider"), "requesters may not decide about their own", CANNOT
    )
    assert page.html.count('type="checkbox" name="_selected_action"') == 3
    deny(gone.pk, user("superuser"), "no")
    approve(edited.pk, user("superuser"), arguments={"cents": 7500}, digest=edited.digest)
    page = read(select("approve", *chosen, role="decider", **confirmed(*chosen)))
    for text in ("1 decision was recorded.", "Denied by superuser on", "Approved by superuser on"):
        assert text in page.text
    assert statuses(*chosen) == ["approved", "denied", "approved", "pending", "pending"]


def test_what_was_not_on_the_page_is_not_decided(world: World) -> None:
    shown, sneaked = world.waiting("shown"), world.waiting("sneaked", 6000)
    says(select("approve", shown, sneaked, **confirmed(shown)), "It was not on the page.")
    assert statuses(shown, sneaked) == ["approved", "pending"]
    assert "Approve selected" not in listed("approval", "viewer").text
    with unchanged():
        for across in "01":
            sent = {"action": "approve_selected", "_selected_action": ["nonsense"], "select_across": across}
            answer = browser("superuser").post(LIST, sent, follow=True)
            says(answer, "Nothing was decided: choose from the list.")
        response = select("deny", sneaked, **{**confirmed(sneaked), "reason": " "})
        says(response, "A denial needs a reason", status=400)
    read(select("deny", sneaked, **{**confirmed(sneaked), "reason": "month is over"}))
    assert Approval.objects.values_list("status", "reason").get(pk=sneaked.pk) == ("denied", "month is over")


@pytest.mark.parametrize("names", [["refund"], ["refund", "transfer"]])
def test_more_cards_cost_no_more_queries(world: World, names: list[str]) -> None:
    """One more for each further tool: whether it was called like that before."""
    tools = [tool(name=name, requires_approval=True, approvers="owners")(paid) for name in names]
    client = browser("decider")

    def costs(session: str, count: int) -> tuple[int, int]:
        calls = [call(names[n % len(names)], cents=5000 + n) for n in range(count)]
        cards = asked(*calls, name=session, tools=tools)
        sent = {"action": "approve_selected", "_selected_action": [str(card.pk) for card in cards]}
        page = queries(lambda: says(client.get(turn(cards[0]))))
        return len(page), len(queries(lambda: says(client.post(LIST, sent))))

    few, many = costs("few", len(names)), costs("many", 20)
    assert few == many
    assert few[0] <= 15 + len(names)
