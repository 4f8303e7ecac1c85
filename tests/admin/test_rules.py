"""Standing rules in the console: who enters, what each button does, the form, and what a card says."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from django.utils import timezone

from agentruns import Agent, Policy, ToolContext, approve, deny, run_agent, tool
from agentruns.models import Approval, ApprovalRule, RuleChange, RuleDecision
from agentruns.services import rules
from agentruns.testing import ScriptedModel, run_until_blocked
from tests.admin.pages import Page, listed, look, read, says, url, words
from tests.admin.people import browser
from tests.admin.texts import HOSTILE
from tests.effects import Effects
from tests.shop.agents import act, call

pytestmark = pytest.mark.django_db(transaction=True)

LIST = reverse("admin:agentruns_approvalrule_changelist")
ADD = reverse("admin:agentruns_approvalrule_add")
SMALL = {"path": "arguments.cents", "op": "<=", "value": 5000}
OF_CENTS = {"of": "arguments.cents"}
OF_PAY = {"agent": "payer", "tool": "pay"}
EMPTY = {"name": "small", "effect": "approve", "reason": "", "expires_at": "", "scope": ""}
VERBS = ("try", "activate", "stop", "retire", "backtest")


@tool(requires_approval=True, sensitive=["iban"])
def pay(ctx: ToolContext, customer: str, cents: int, iban: str = "DE02-secret", fast: bool = False) -> str:
    """Pay."""
    return act("pay", ctx, customer=customer, cents=cents)


@pytest.fixture(autouse=True)
def _payer(effects: Effects) -> None:
    payer(500)


def payer(*amounts: int, customer: str = "C1") -> Agent:
    """Make the agent "payer", whose first reply makes a payment for each of `amounts`."""
    calls = [call("pay", customer=customer, cents=cents) for cents in amounts]
    script = ScriptedModel([{"tools": calls}, {"text": "done"}])
    return Agent("payer", instructions="Pay.", tools=[pay], model=script)


def asked(cents: int = 500, session: str = "", **about: Any) -> Approval:
    """Let the agent ask for a payment in a session of its own; return the card."""
    result = run_agent(payer(cents, **about), "pay", session or f"s-{uuid4()}")
    return Approval.objects.get(run_id=result.run_id)


def paid_for(*amounts: int) -> None:
    """Let people approve payments."""
    for cents in amounts:
        approve(asked(cents).pk, None)
    run_until_blocked()


def drafted(*conditions: Any, actor: Any = None, **fields: Any) -> ApprovalRule:
    return rules.draft_rule(actor, conditions=conditions or [SMALL], **{"name": "small", **OF_PAY, **fields})


def writer(*names: str) -> Any:
    """Return a client of somebody with these permissions, who is staff."""
    somebody = User.objects.create_user("+".join(names) or "nobody", is_staff=True)
    somebody.user_permissions.set(Permission.objects.filter(codename__in=names))
    client = browser("anonymous")
    client.force_login(somebody)
    return client


def press(rule: ApprovalRule, verb: str, client: Any = None, **data: Any) -> Any:
    seen = str(rule.changes.first().pk)
    return (client or browser("superuser")).post(url(rule, verb), {"seen": seen, **data})


def shown(rule: ApprovalRule) -> Page:
    return look(rule)


def send(**data: Any) -> Any:
    return browser("superuser").post(f"{ADD}?agent=payer&tool=pay", {**EMPTY, **data})


def test_who_finds_rules_and_who_may_write_or_activate_them() -> None:
    made = drafted()
    for names, sees, writes in (
        ((), 403, False),
        (("decide_approval", "view_run"), 403, False),
        (("view_approvalrule",), 200, False),
        (("activate_rule",), 200, False),
        (("write_rule",), 200, True),
    ):
        client = writer(*names)
        for path in (LIST, url(made), url(made, "history")):
            assert client.get(path).status_code == sees, (names, path)
        assert client.get(ADD).status_code == (200 if writes else 403)
        assert client.post(f"{ADD}?agent=payer&tool=pay", EMPTY).status_code == (400 if writes else 403)
        assert ("Standing rules" in client.get("/admin/").content.decode()) == (sees == 200)
        if sees == 200:
            page = says(client.get(url(made)), "Approve pay if cents is at most 5000.")
            offered = {verb for verb in VERBS if url(made, verb) in page.forms}
            assert offered == {
                (): set(), ("view_approvalrule",): set(), ("activate_rule",): {"activate"},
                ("write_rule",): {"try", "retire", "backtest"},
            }[names]  # fmt: skip
        before = (ApprovalRule.objects.values().get(), RuleChange.objects.count())
        for verb in VERBS:
            if sees == 200 and verb in offered:
                continue
            assert press(made, verb, client).status_code in ((403, 409) if sees == 200 else (403,)), verb
        assert (ApprovalRule.objects.values().get(), RuleChange.objects.count()) == before
    for verb in VERBS:
        assert browser("superuser").get(url(made, verb)).status_code == 302, "GET changes nothing"
        strict = browser("superuser", enforce_csrf_checks=True)
        assert press(made, verb, strict).status_code == 403
    assert browser("superuser").post(url(made)).status_code == 403
    assert browser("superuser").post(url(made, "delete"), {"post": "yes"}).status_code == 403


class Scoped(Policy):
    """People see what is of their scope: their username."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(scope=user.get_username())

    def scope(self, user: Any) -> str:
        return "" if user is None else str(user.get_username())


def test_rules_of_another_scope_are_not_there(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Scoped"
    names = ("write_rule", "activate_rule")
    client = writer(*names)
    scope = "+".join(names)
    mine, other = drafted(scope=scope), drafted(scope="other", reason="secret")
    page = says(client.get(LIST))
    assert (url(mine) in str(page.links), url(other) in str(page.links)) == (True, False)
    assert client.get(url(other)).status_code == 404
    for verb in VERBS:
        assert press(other, verb, client).status_code == 404
    assert "secret" not in client.get(ADD, {"rule": other.pk}).content.decode()
    page = says(client.get(f"{ADD}?agent=payer&tool=pay"))
    assert page.forms[""]["scope"] == scope, "their own"
    row = {"path": "cents", "op": "<=", "value": "5"}
    answer = client.post(f"{ADD}?agent=payer&tool=pay", {**EMPTY, **row, "scope": "other"})
    says(answer, "may not do this to the rule", status=403)
    assert ApprovalRule.objects.count() == 2


def test_each_button_does_its_one_thing_and_is_logged(requests_commit: str, effects: Effects) -> None:
    made, client = drafted(), browser("superuser")
    for verb, status, then in (
        ("try", "dry-run", {"activate", "stop", "retire"}),
        ("activate", "active", {"try", "stop", "retire"}),
        ("stop", "stopped", {"try", "activate", "retire"}),
        ("activate", "active", {"try", "stop", "retire"}),
        ("retire", "retired", set()),
    ):
        response = press(made, verb, client, why=f"because {verb}")
        assert (response.status_code, response.url) == (302, url(made))
        page = shown(made)
        made.refresh_from_db()
        assert made.status == status
        assert {verb for verb in VERBS[:4] if url(made, verb) in page.forms} == then
        change = made.changes.first()
        assert (change.status, change.actor_name) == (status, "superuser")
        assert change.why == (f"because {verb}" if verb in ("stop", "retire") else "")
        assert change.why in page.text
    assert LogEntry.objects.count() == 5
    assert RuleChange.objects.count() == 6


def test_a_page_that_shows_an_older_status_changes_nothing_but_stop_stops() -> None:
    made, client = drafted(), browser("superuser")
    seen = {"seen": str(made.changes.first().pk)}
    rules.activate_rule(made.pk, None)
    rules.stop_rule(made.pk, None, "A call is in doubt.")
    for verb in ("activate", "try", "retire"):
        page = says(client.post(url(made, verb), seen), "has changed since you looked", status=409)
        assert "A call is in doubt." in page.text, "and shows how it is now"
    assert client.post(url(made, "activate"), {}).status_code == 409
    rules.activate_rule(made.pk, None)
    assert client.post(url(made, "stop"), seen).status_code == 302
    says(client.post(url(made, "stop")), "is stopped: it cannot become stopped", status=409)
    rules.retire_rule(made.pk, None)
    says(press(made, "activate"), "it cannot become active", status=409)


def test_a_new_active_version_says_that_it_replaces_another() -> None:
    first = drafted()
    rules.activate_rule(first.pk, None)
    second = drafted({**SMALL, "value": 700})
    page = shown(second)
    assert "Rule small:1 is active now. It retires." in page.text
    assert "2 (draft), 1 (active)" in words(page)
    assert press(second, "activate").status_code == 302
    assert "Version 2 took its place." in shown(first).text
    page = listed("approvalrule")
    assert page.text.index("small:2") < page.text.index("small:1"), "the newest first"
    assert "small:1" not in listed("approvalrule", status__exact="active").text.split("Filter")[0]
    assert "small:2" not in listed("approvalrule", tool="other").text
    assert browser("superuser").get(LIST, {"reason": "x"}).status_code == 302, "no filter by any column"


def test_the_past_is_tried_on_the_page(effects: Effects) -> None:
    paid_for(100, 200, 9000)
    denied, hidden = asked(300), asked(400)
    deny(denied.pk, None, "no")
    made = drafted(caps=[{"of": "arguments.cents", "most": "350", "seconds": 86400, "per": []}])
    assert press(made, "backtest").status_code == 200
    page = says(press(made, "backtest"), "Would have approved 2 of 4 cards; people decided differently in 0.")
    assert "For 1 more a cap was full." in page.text
    made = drafted()
    page = says(press(made, "backtest"), "Would have approved 3 of 4 cards; people decided differently in 1.")
    assert "a person denied" in page.text
    assert url(denied) in page.links
    assert url(hidden) not in page.links
    page = says(press(made, "backtest", writer("write_rule")), "people decided differently in 1.")
    assert url(denied) not in page.links
    assert "The newest that you may see: 0 of 1." in page.text
    assert RuleChange.objects.count() == 2, "it changes nothing"
    asks = drafted(effect="ask", name="ask")
    says(press(asks, "backtest"), "Would have asked a person about 3 of 4 cards.")


def test_a_dry_run_says_so_on_cards_and_its_page_compares_it_with_people(effects: Effects) -> None:
    made = rules.try_rule(drafted(caps=[{"of": "count", "most": "2", "seconds": 3600, "per": []}]).pk, None)
    cards = [asked(100), asked(200), asked(300), asked(9000)]
    line = "Rule small:1 is on a dry run and would approve this. It decides nothing."
    page = look(cards[0], line)
    assert url(made) in page.links
    assert url(made) not in look(cards[0], line, role="decider").links, "who may not see rules gets no link"
    look(cards[2], "would ask a person about this")
    assert "dry run" not in look(cards[3]).text
    approve(cards[0].pk, None)
    deny(cards[1].pk, None, "no")
    page = shown(made)
    assert "Would have decided 1 as people did, 1 differently." in words(page)
    assert page.links.count(url(cards[1])) == 2
    assert "At most 2 calls in an hour 2 of 2 used" in words(page)
    assert "approve dry run" in words(page)
    rules.activate_rule(made.pk, None)
    assert "dry run and would" not in look(cards[2]).text


def test_what_it_decided_is_listed_with_what_was_given_back(effects: Effects) -> None:
    cap = {"of": "arguments.cents", "most": "2000.5", "seconds": 3 * 86400, "per": ["arguments.customer"]}
    made = rules.activate_rule(drafted(caps=[cap]).pk, None)
    cards = [asked(500), asked(600)]
    page = look(cards[0], "Decided by rule small:1")
    assert page.links.count(url(made)) == 2, "one in its history"
    seen = look(cards[0], "rule:small:1", role="viewer")
    assert url(made) not in seen.links
    assert "Via" not in page.text + seen.text, "its id says nothing"
    RuleDecision.objects.filter(approval_id=cards[1].pk).update(released_at=timezone.now())
    page = shown(made)
    assert [url(card) in page.links for card in cards] == [True, True]
    assert page.text.count("given back: the call never started") == 1
    assert "At most 2000.5 of cents per customer in 3 days 500 used, in all" in words(page)
    page = says(writer("write_rule").get(url(made)), "a card that you may not see")
    assert url(cards[0]) not in page.links
    denies = rules.activate_rule(drafted(name="no", effect="deny", reason="Not today.").pk, None)
    denied = asked(40)
    assert "given back" not in shown(denies).text, "nothing was counted"
    assert url(denies) in look(denied, "Decided by rule no:1").links


def test_a_card_suggests_a_rule_that_one_press_drafts_once(effects: Effects) -> None:
    paid_for(*[500] * 6)
    card = asked(450)
    page = look(card, "6 calls like this one were approved, none denied.")
    assert "like this one" not in look(card, role="decider").text
    assert browser("decider").post(url(card, "draft_rule")).status_code == 409
    assert browser("superuser").get(url(card, "draft_rule")).status_code == 302
    for _press in range(2):
        response = browser("superuser").post(url(card, "draft_rule"), follow=True)
        made = ApprovalRule.objects.get()
        assert response.redirect_chain == [(url(made), 302)]
        page = says(response, "cents is at most 500", "The draft is written. It decides nothing.")
    assert (made.status, made.author_name) == ("draft", "superuser")
    assert "secret" not in page.text
    deny(asked(450).pk, None, "no")
    assert "like this one" not in look(card).text
    says(browser("superuser").post(url(card, "draft_rule")), "suggest no rule any more", status=409)


def test_the_form_writes_typed_values_rows_and_the_rest() -> None:
    expires = timezone.localtime() + timedelta(days=30)
    answer = send(
        path=["cents", "customer", " customer ", "fast", "context.plan", "requester", ""],
        op=["<=", "in", "prefix", "==", "in", "in", "=="],
        value=["5000", "C1, C2,\r\n", "C", "true", 'gold\r\n"5"\r\n5\r\n', "7, 8", ""],
        most=["200", "50.5", ""], of=["count", "arguments.cents", "count"], number=["1", "36", ""],
        unit=["86400", "3600", "86400"], per=["", "customer, requester", ""],
        reason="Small sums", expires_at=f"{expires:%Y-%m-%dT%H:%M}", untrusted="1", scope="shop",
    )  # fmt: skip
    made = ApprovalRule.objects.get()
    assert (answer.status_code, answer.url) == (302, url(made))
    assert [(each["path"], each["op"], each["value"]) for each in made.conditions] == [
        ("arguments.cents", "<=", 5000),
        ("arguments.customer", "in", ["C1, C2,"]),
        ("arguments.customer", "prefix", "C"),
        ("arguments.fast", "==", True),
        ("context.plan", "in", ["gold", "5", 5]),
        ("requester", "in", ["7", "8"]),
    ]
    assert made.caps == [
        {"of": "count", "most": "200", "seconds": 86400, "per": []},
        {
            "of": "arguments.cents",
            "most": "50.5",
            "seconds": 129600,
            "per": ["arguments.customer", "requester"],
        },
    ]
    assert (made.reason, made.untrusted, made.scope) == ("Small sums", True, "shop")
    assert made.expires_at.replace(tzinfo=None) == made.expires_at.replace(second=0, tzinfo=None)
    assert abs(made.expires_at - expires) < timedelta(minutes=1)


def test_a_new_version_is_filled_with_the_values_of_the_old_one_and_loses_none() -> None:
    values = ["a, b", " x", '"q"', "5", "true", "null", "", "line\nline", "\u202eevil", "محمد", "C1"]
    conditions: list[Any] = [{"path": "arguments.customer", "op": "==", "value": each} for each in values]
    conditions += [
        {"path": "arguments.customer", "op": "in", "value": values},
        {"path": "context.plan", "op": "in", "value": [1, "1", True, "true", None, 2.5]},
        {"path": "arguments.cents", "op": "<=", "value": "12.50"},
        {"path": "arguments.customer", "op": "regex", "value": r"C\d{1,3}, \S+"},
        {"path": "requester", "op": "==", "value": "7"},
    ]
    caps = [
        {"of": "context.points", "most": "10", "seconds": 90, "per": ["context.plan"]},
        {"of": "count", "most": "0", "seconds": 86400 * 30, "per": []},
        {"of": "arguments.cents", "most": "3", "seconds": 7200, "per": []},
    ]
    until = timezone.now().replace(second=0, microsecond=0) + timedelta(days=2)
    old = drafted(*conditions, caps=caps, reason="why", untrusted=True, expires_at=until)
    page = browser("superuser").get(ADD, {"rule": old.pk}).content.decode()
    assert "New version of rule small:1" in read(browser("superuser").get(ADD, {"rule": old.pk})).text
    answer = browser("superuser").post(f"{ADD}?rule={old.pk}", sends(page))
    assert answer.status_code == 302, words(read(answer))
    new = ApprovalRule.objects.get(version=2)
    for name in (
        "conditions",
        "caps",
        "reason",
        "untrusted",
        "expires_at",
        "effect",
        "agent",
        "tool",
        "scope",
    ):
        assert getattr(new, name) == getattr(old, name), name


def sends(page: str) -> dict[str, list[str]]:
    """Return what a browser sends of the form of a rule as it is."""
    given: dict[str, list[str]] = {}
    form = page.split('class="ar-form ar-rule">')[1].split("</form>", maxsplit=1)[0]
    control = r"<input\b([^>]*)>|<(textarea|select)\b([^>]*)>(.*?)</\2>"
    for alone, kind, attributes, inner in re.findall(control, form, re.DOTALL):
        found = dict(re.findall(r'([\w-]+)="([^"]*)"', alone or attributes))
        value = found.get("value", "")
        if kind == "textarea":
            value = inner.removeprefix("\n").replace("\n", "\r\n")
        elif kind == "select":
            chosen = re.search(r'value="([^"]*)" selected', inner) or re.search(r'value="([^"]*)"', inner)
            value = chosen[1] if chosen else ""
        elif found.get("type") == "checkbox" and "checked" not in alone:
            continue
        given.setdefault(found["name"], []).append(unescape(value))
    return given


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, "A rule that approves needs a condition or a cap."),
        ({"name": "Big Name"}, "The name must be small letters"),
        ({"effect": "deny"}, "A rule that denies needs a reason"),
        ({"effect": "no"}, "is not valid"),
        ({"most": "5", "number": "1", "expires_at": "2001-01-01T10:00"}, "must expire in the future"),
        ({"expires_at": "9999-12-31T23:59"}, "It expires at no time."),
        ({"expires_at": "soon"}, "It expires at no time."),
        ({"path": "cents", "op": "<=", "value": "many"}, "the value must be a number"),
        ({"path": "cents", "op": "==", "value": "many"}, "of the parameter's type"),
        ({"path": "cents", "op": "==", "value": " "}, "of the parameter's type"),
        ({"path": "cents", "op": "in", "value": " , "}, "a list of values"),
        ({"path": "cents", "op": "prefix", "value": "5"}, "the value must be a text"),
        ({"path": "customer", "op": "regex", "value": "("}, "is not a regular expression"),
        ({"path": "", "op": "==", "value": "5"}, "is not requester, arguments.NAME or context.NAME"),
        ({"path": "nothing", "op": "==", "value": "5"}, "the tool has no parameter nothing."),
        ({"path": "iban", "op": "==", "value": "5"}, "iban is a sensitive parameter"),
        ({"path": "cents", "op": "~", "value": "5"}, "op is one of"),
        ({"most": "5"}, "seconds must be a whole number"),
        ({"most": "", "number": "5"}, "most must be a number"),
        ({"most": "5", "number": "1", "per": "nothing"}, "the tool has no parameter nothing."),
        ({"most": "5", "number": "1", "of": "arguments.customer"}, "is no number"),
        ({"most": "5", "number": "9" * 40}, "seconds must be a whole number"),
        ({"most": "5", "number": "1", "unit": "x"}, "seconds must be a whole number"),
        ({"path": "context." + "x" * 300, "op": "==", "value": "1"}, "is not requester"),
    ],
)
def test_a_refused_form_says_why_and_keeps_what_was_typed(sent: dict[str, str], said: str) -> None:
    given = {**EMPTY, "reason": "", **sent}
    if {"path", "value"} & sent.keys():
        given = {"op": "==", **given}
    if {"most", "number"} & sent.keys():
        given = {"of": "count", "unit": "86400", "number": "", "per": "", **given}
    response = browser("superuser").post(f"{ADD}?agent=payer&tool=pay", given)
    says(response, "Nothing was written.", said, status=400)
    kept = sends(response.content.decode())
    for name, value in sent.items():
        is_offered = value not in ("~", "x", "no")  # no choice of the form
        if value.strip() and is_offered:
            assert value.strip() in [each.strip() for each in kept[name]], name
    assert not ApprovalRule.objects.exists()


def test_only_tools_that_rules_may_answer_are_offered() -> None:
    @tool(requires_approval=True, approvals=2)
    def grant(cents: int) -> str:
        """Grant."""
        return ""

    @tool
    def look_up(order: str) -> str:
        """Look up."""
        return ""

    @tool(outward=True)
    def send_mail(text: str) -> str:
        """Send."""
        return ""

    Agent("payer", instructions="", tools=[pay, grant, look_up, send_mail], model=ScriptedModel([]))
    page = says(browser("superuser").get(ADD), "grant no rule may answer it: 2 people have to approve it")
    assert {f"{ADD}?agent=payer&tool={name}" for name in ("pay", "send_mail")} <= {*page.links}
    assert "look_up" not in page.text
    says(browser("superuser").get(f"{ADD}?agent=payer&tool=gone"), "has no agent payer with a tool gone")
    row = {"path": "cents", "op": "<=", "value": "5"}
    answer = browser("superuser").post(f"{ADD}?agent=payer&tool=grant", {**EMPTY, **row})
    says(answer, "No standing rule may answer grant", status=400)


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_and_values_are_text(hostile: str, effects: Effects) -> None:
    text = "".join(character for character in hostile if character not in "\x00\ud800")
    made = drafted({"path": "arguments.customer", "op": "in", "value": [hostile, "C1"]}, reason=hostile)
    rules.activate_rule(made.pk, None)
    card = asked(5, customer=hostile)
    rules.stop_rule(made.pk, None, hostile)
    ApprovalRule.objects.update(name=text[:64], scope=text, agent=f"{text}!"[:100], author_name=text)
    made.refresh_from_db()
    client = browser("superuser")
    for response in (
        client.get(LIST), client.get(url(made)), client.get(url(card)), press(made, "backtest"),
        client.get(ADD, {"rule": made.pk}),
        client.get(ADD, {"agent": hostile.encode(errors="replace"), "tool": text}),
        client.get(LIST, {"tool": text, "status__exact": text}),
    ):  # fmt: skip
        page = says(response)
        assert not [link for link in page.links if link.startswith(("http", "javascript"))]
    ApprovalRule.objects.update(agent="payer")
    sent = {
        "path": hostile,
        "op": "==",
        "value": hostile,
        "reason": hostile,
        "scope": hostile,
        "per": hostile,
    }
    raw = {name: value.encode(errors="replace").decode() for name, value in {**EMPTY, **sent}.items()}
    assert client.post(f"{ADD}?agent=payer&tool=pay", raw).status_code == 400


def test_a_value_written_from_right_to_left_moves_nothing_in_the_sentence() -> None:
    made = drafted({"path": "arguments.customer", "op": "in", "value": ["ليلى", "محمد"]}, SMALL)
    for page in (shown(made), listed("approvalrule")):
        assert '\u2068"ليلى"\u2069, \u2068"محمد"\u2069 and cents is at most 5000.' in page.text


def test_what_the_project_redacts_is_redacted_and_never_fills_a_form(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = f"{__name__}.without_cards"
    made = drafted({"path": "arguments.customer", "op": "==", "value": "4242-4242"}, reason="4242-4242")
    client = browser("superuser")
    for response in (client.get(LIST), client.get(url(made)), client.get(ADD, {"rule": made.pk})):
        assert "4242-4242" not in read(response).html
    page = client.get(ADD, {"rule": made.pk}).content.decode()
    assert browser("superuser").post(f"{ADD}?rule={made.pk}", sends(page)).status_code == 400


def without_cards(text: str) -> str:
    """Hide numbers of cards."""
    return text.replace("4242-4242", "[card]")
