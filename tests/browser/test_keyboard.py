"""Everything by keyboard: the keys of the console, and Tab, which shows where one is."""

from __future__ import annotations

import pytest

from tests.browser.desk import CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.visitor import QUEUE, REASON, RUNS, Visitor, call_path, decided, path_of
from tests.effects import Effects

# Whether what has the focus is drawn differently for it, in anything that a person can see.
FOCUS = """wanted => {
    const element = document.activeElement;
    const look = () => {
        document.getAnimations().forEach(animation => animation.finish());
        const style = getComputedStyle(element);
        return [style.outline, style.boxShadow, style.borderColor, style.backgroundColor,
                style.textDecoration, style.color].join();
    };
    const html = element === document.body ? "" : element.outerHTML;
    if (!wanted.includes(html)) return [html, true];
    const focused = look();
    element.blur();
    const plain = look();
    element.focus({focusVisible: true});
    return [html, focused !== plain];
}"""
LOOK = """element => {
    document.getAnimations().forEach(animation => animation.finish());
    const style = getComputedStyle(element);
    return [style.outline, style.boxShadow, style.backgroundColor].join();
}"""
# One of each group of radio buttons is a stop; arrow keys go from one to the other.
STOPS = (
    "#content :is(a[href], button, input, select, textarea, summary)"
    ":not([disabled], [type=hidden], [type=radio], [tabindex='-1'])"
)


def focused(visitor: Visitor) -> str:
    """Return what has the focus, in words."""
    return str(
        visitor.page.evaluate(
            "(document.activeElement.labels?.[0] || document.activeElement).innerText.trim()"
        )
    )


def test_from_the_queue_to_a_decision_in_three_keys(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(QUEUE)
    visitor.press("Enter")
    visitor.wait_until_at(approval)
    visitor.press("a", "Enter")
    visitor.wait_for("Approved. A worker runs the call.")
    assert visitor.keys <= 3
    assert visitor.clicks == 0
    assert decided(approval) == ("approved", "superuser")


def test_walking_through_the_queue(desk: Desk, visitor: Visitor) -> None:
    third, first, second = desk.one(TICKET), desk.one(REFUND), desk.one(MAIL)
    for keys, opening, expected in (
        ("", "Enter", first),
        ("", "a", first),
        ("j", "Enter", second),
        ("jj", "a", third),
        ("jjj", "Enter", third),
        ("jk", "a", first),
        ("k", "Enter", first),
        ("J", "a", second),
    ):
        visitor.open(QUEUE)
        visitor.press(*keys, opening)
        visitor.wait_until_at(expected)


def test_the_marked_row_shows(desk: Desk, visitor: Visitor) -> None:
    for what in (REFUND, MAIL):
        desk.one(what)
    visitor.open(QUEUE)
    first, second = visitor.page.locator("#result_list tbody tr").all()
    marked, plain = first.evaluate(LOOK), second.evaluate(LOOK)
    visitor.press("j")
    assert first.evaluate(LOOK) != marked
    assert second.evaluate(LOOK) != plain
    visitor.press("k")
    assert (first.evaluate(LOOK), second.evaluate(LOOK)) == (marked, plain)


def test_from_card_to_card(desk: Desk, visitor: Visitor) -> None:
    second, first = desk.one(MAIL), desk.one(REFUND)
    visitor.open(first)
    visitor.press("j")
    visitor.wait_until_at(second)
    visitor.press("k")
    visitor.wait_until_at(first)
    with visitor.staying():
        visitor.press("k")
    assert visitor.path == path_of(first)


def test_through_the_calls_in_doubt(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    doubts = []
    for number in range(3):
        doubts.append(desk.in_doubt(session=f"t-{number}"))
        effects.path.unlink()
    first, second, third = (call_path(*doubt) for doubt in doubts)
    visitor.open(f"{RUNS}in-doubt/")
    visitor.press("j", "a", "Enter")
    visitor.wait_until_at(second)
    visitor.wait_for("2 of 3")
    for key, where in (("k", first), ("j", second), ("j", third)):
        visitor.press(key)
        visitor.wait_until_at(where)
    for where in (first, second):
        visitor.choose("Unknown: tell the model")
        visitor.wait_until_at(where)
    box = visitor.button("It happened").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900, "in the first screen"
    visitor.choose("Unknown: tell the model")
    visitor.wait_until_at(doubts[1][0])


def test_denying(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    with visitor.refused(400):
        visitor.press("d", "Enter")
    visitor.wait_for("Say why, and press Deny again.")
    assert focused(visitor).startswith(REASON)
    assert visitor.button("Approve").count() == 0
    visitor.page.keyboard.type("A jade kettle? Deny.")  # each letter of which is a key elsewhere
    visitor.press("Tab")
    assert focused(visitor).startswith("Deny")
    visitor.press("Enter")
    visitor.wait_for("Denied.")
    assert decided(approval) == ("denied", "superuser")
    assert approval.reason == "A jade kettle? Deny."


def test_editing(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.press("e")
    assert focused(visitor).startswith("order"), "the first of the signature"
    visitor.press("Tab", "Control+a")
    visitor.page.keyboard.type("100")
    visitor.press("Enter")
    visitor.wait_for("Approved. A worker runs the call.")
    assert decided(approval) == ("approved", "superuser")
    assert approval.arguments["cents"] == 100


def test_nothing_is_decided_by_one_key(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    for key in ("a", "d", "e", "A", "Control+a", "Alt+d", "y", "1"):
        visitor.open(approval)
        with visitor.staying():
            visitor.press(key)
        assert visitor.path == path_of(approval)
        assert decided(approval) == ("pending", "")


def test_letters_typed_into_the_search_are_letters(desk: Desk, visitor: Visitor) -> None:
    desk.one(REFUND)
    visitor.open(QUEUE)
    search = visitor.page.locator("#searchbar")
    search.focus()
    visitor.page.keyboard.type("jade")
    assert search.input_value() == "jade"
    visitor.press("Enter")
    visitor.page.wait_for_url("**q=jade*")


def test_keys_that_a_question_has_not(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(QUESTION)
    visitor.open(approval)
    with visitor.staying():
        visitor.press("e")
    assert decided(approval) == ("pending", "")
    visitor.press("a")
    assert focused(visitor).startswith("Yes, a new one")
    visitor.press("Enter")
    visitor.wait_for("Answered.")
    assert decided(approval) == ("answered", "superuser")


@pytest.mark.parametrize("what", ["queue", "card", "question", "orphan", "turn", "run", "runs", "doubts"])
def test_tab_reaches_everything_and_shows_where_one_is(desk: Desk, visitor: Visitor, what: str) -> None:
    refund, _mail = desk.ask(REFUND, MAIL)
    run, call_id = desk.in_doubt()
    question = desk.one(QUESTION)
    places = {
        "queue": QUEUE,
        "card": refund,
        "question": question,
        "orphan": f"{RUNS}{run.pk}/calls/{call_id}/",
        "turn": f"{QUEUE}turn/{refund.run_id}/",
        "run": run,
        "runs": RUNS,
        "doubts": f"{RUNS}in-doubt/",
    }
    page = visitor.open(places[what])
    visitor.unfold()
    stops = page.locator(STOPS).filter(visible=True)
    wanted = stops.evaluate_all("all => all.map(element => element.outerHTML)")
    reached, unseen = set(), []
    page.evaluate("document.querySelector('a').focus()")
    for _ in range(len(wanted) + 80):
        page.keyboard.press("Tab")
        # Each once: to look takes the focus away, and a date has several fields to go through.
        html, shows = page.evaluate(FOCUS, [one for one in wanted if one not in reached])
        if not html:
            break
        reached.add(html)
        unseen += [] if shows else [html]
    assert set(wanted) - reached == set()
    assert unseen == []


def test_deciding_with_tab_and_enter_alone(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(CREDIT)
    page = visitor.open(approval)
    for _ in range(80):
        visitor.press("Tab")
        if focused(visitor).startswith("Approve"):
            break
    visitor.press("Enter")
    visitor.wait_for("Your approval is recorded: 1 of 2.")
    assert page.url
