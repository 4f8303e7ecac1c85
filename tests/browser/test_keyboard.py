"""Everything by keyboard: the keys of the console, and Tab, which shows where one is."""

from __future__ import annotations

from tests.browser.desk import MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.visitor import QUEUE, REASON, RUNS, Visitor, call_path, decided, path_of, turn_path
from tests.effects import Effects

# What the Tab key has still to reach (of radio buttons one is a stop, and arrow keys lead on), and what had
# the focus and was drawn as without it in all that a person can see.
WATCH = """() => {
    const look = element => {
        document.getAnimations().forEach(animation => animation.finish());
        const style = getComputedStyle(element);
        return [style.outline, style.boxShadow, style.borderColor, style.backgroundColor,
                style.textDecoration, style.color].join();
    };
    const stops = "#content :is(a[href], button, input, select, textarea, summary)";
    const others = ":not([disabled], [type=hidden], [type=radio], [tabindex='-1'])";
    const isShown = each => each.getClientRects().length && each.checkVisibility({visibilityProperty: true});
    const all = new Set([...document.querySelectorAll(stops + others)].filter(isShown));
    let focused = "";
    window.left = new Set(all);
    window.unseen = [];
    addEventListener("focusin", ({target}) => { left.delete(target); focused = look(target); });
    addEventListener("focusout", ({target}) => {
        if (all.has(target) && look(target) === focused) unseen.push(target.outerHTML);
    });
    document.querySelector("a").focus();
    return left.size;
}"""

LOOK = """element => {
    document.getAnimations().forEach(animation => animation.finish());
    const style = getComputedStyle(element);
    return [style.outline, style.boxShadow, style.backgroundColor].join();
}"""


def focused(visitor: Visitor) -> str:
    """Read what has the focus."""
    return str(
        visitor.page.evaluate(
            "(document.activeElement.labels?.[0] || document.activeElement).innerText.trim()"
        )
    )


def test_walking_through_the_queue(desk: Desk, visitor: Visitor) -> None:
    third, first, second = desk.one(TICKET), desk.one(REFUND), desk.one(MAIL)
    for keys, opening, expected in (
        ("", "Enter", first),
        ("k", "a", first),
        ("j", "Enter", second),
        ("jk", "Enter", first),
        ("jjj", "a", third),
        ("J", "a", second),
    ):
        visitor.open(QUEUE)
        visitor.press(*keys, opening)
        visitor.wait_until_at(expected)
    visitor.open(QUEUE)
    one, other = visitor.page.locator("#result_list tbody tr").all()[:2]
    marked, plain = one.evaluate(LOOK), other.evaluate(LOOK)
    visitor.press("j")
    assert one.evaluate(LOOK) != marked
    assert other.evaluate(LOOK) != plain
    visitor.press("k")
    assert (one.evaluate(LOOK), other.evaluate(LOOK)) == (marked, plain)
    search = visitor.page.locator("#searchbar")
    search.focus()
    visitor.page.keyboard.type("jade")
    assert search.input_value() == "jade", "letters typed into the search are letters"
    visitor.press("Enter")
    visitor.page.wait_for_url("**q=jade*")


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
    page = visitor.open(approval)
    with visitor.staying():
        for key in ("A", "Control+a", "Alt+d", "y", "1", "a", "d", "e"):
            visitor.press(key)
            page.evaluate("document.activeElement.blur()")
    assert visitor.path == path_of(approval)
    assert decided(approval) == ("pending", "")


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


def test_tab_reaches_everything_and_shows_where_one_is(desk: Desk, visitor: Visitor) -> None:
    refund, _mail = desk.ask(REFUND, MAIL)
    run, call_id = desk.in_doubt()
    orphan, turn = call_path(run, call_id), turn_path(refund.run)
    for place in (QUEUE, refund, desk.one(QUESTION), orphan, turn, run, RUNS, f"{RUNS}in-doubt/"):
        page = visitor.open(place)
        visitor.unfold()
        for number in range(page.evaluate(WATCH) + 80):
            page.keyboard.press("Tab")
            if number % 20 == 0 and not page.evaluate("left.size"):
                break
        page.evaluate("document.activeElement.blur()")
        assert page.evaluate("[...left].map(element => element.outerHTML)") == [], place
        assert page.evaluate("unseen") == [], place
