"""Everything by keyboard: the keys of the console, and Tab, which shows where one is."""

from __future__ import annotations

from tests.browser.desk import CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.visitor import QUEUE, REASON, RUNS, Visitor, call_path, decided, path_of, turn_path
from tests.effects import Effects

# One of each group of radio buttons is a stop; arrow keys go from one to the other.
WATCH = """() => {
    const stops = "#content :is(a[href], button, input, select, textarea, summary)";
    const others = ":not([disabled], [type=hidden], [type=radio], [tabindex='-1'])";
    const isShown = each => each.getClientRects().length && each.checkVisibility({visibilityProperty: true});
    window.left = new Set([...document.querySelectorAll(stops + others)].filter(isShown));
    document.querySelector("a").focus();
    return left.size;
}"""
# What has the focus now, if that is drawn as without it in all that a person can see. Each is looked at once:
# to look takes the focus away, and a date has several fields to go through.
FOCUS = """() => {
    const element = document.activeElement;
    const look = () => {
        document.getAnimations().forEach(animation => animation.finish());
        const style = getComputedStyle(element);
        return [style.outline, style.boxShadow, style.borderColor, style.backgroundColor,
                style.textDecoration, style.color].join();
    };
    if (element === document.body) return "the end";
    if (!left.delete(element)) return "";
    const focused = look();
    element.blur();
    const plain = look();
    element.focus({focusVisible: true});
    return focused === plain ? element.outerHTML : "";
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


def test_tab_reaches_everything_and_shows_where_one_is(desk: Desk, visitor: Visitor) -> None:
    refund, _mail = desk.ask(REFUND, MAIL)
    run, call_id = desk.in_doubt()
    orphan, turn = call_path(run, call_id), turn_path(refund.run)
    for place in (QUEUE, refund, desk.one(QUESTION), orphan, turn, run, RUNS, f"{RUNS}in-doubt/"):
        page = visitor.open(place)
        visitor.unfold()
        unseen = []
        for _ in range(page.evaluate(WATCH) + 80):
            page.keyboard.press("Tab")
            if (html := page.evaluate(FOCUS)) == "the end":
                break
            unseen += [html] * bool(html)
        assert page.evaluate("[...left].map(element => element.outerHTML)") == [], place
        assert unseen == [], place


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
