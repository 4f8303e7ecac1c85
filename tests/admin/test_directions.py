"""A name written from right to left moves nothing that stands beside it: on no page, in no mail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core import mail
from django.test import Client
from django.urls import reverse
from django.utils import translation

from agentruns import Agent, ToolContext, approve, deny, run_agent, start_run, tool
from agentruns.admin import html
from agentruns.admin.html import plain, visible
from agentruns.contrib.mail import MailNotifier
from agentruns.journal import outbox
from agentruns.models import Approval, Control, Message, Notification, Review, Run, Session
from agentruns.providers.base import ProviderError
from agentruns.services import reviews, switches
from agentruns.services.absences import plan_absence
from agentruns.services.runs.control import pause_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.utils.characters import isolated
from tests.admin.people import browser, user
from tests.directions import Lines, contexts, strings, swapped, turns
from tests.masks.exits import console
from tests.registry import isolated_registry
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

# Of Arabic and of Hebrew: who asks, who decides, whom it is about, and what they say.
ASKS, DECIDES, GETS, OTHER = "محمد 12", "ליאת", "ليلى", "فاطمة 7"
AGENT, VERSION, SESSION, SCOPE = "وكيل 3", "\u0661.\u0662", "طلب 4711", "متجر 5"
CURRENCY = "د.إ"
WHY, ERROR = "المبلغ 5 مرتفع", "المصرف 503 مغلق"


def titled(args: dict[str, Any]) -> str:
    return f"Voucher of 5.00 EUR to {args['to']}"


def previewed(args: dict[str, Any]) -> dict[str, Any]:
    links = [{"label": f"{args['to']} 9", "url": "https://shop.example/1"}]
    return {"before": {"اسم 1": args["to"]}, "after": {"اسم 1": OTHER}, "links": links, "warnings": [WHY]}


@tool(requires_approval=True, describe=titled, preview=previewed)
def voucher(to: str, cents: int, note: str = "") -> dict[str, Any]:
    """Send a voucher."""
    return {"sent": True, "لمن": to, "cents": cents}


@tool
def refuse(to: str, note: str) -> str:
    """Fail with a name."""
    raise ValueError(f"{ERROR}: {to}")


@tool
def vanish(to: str, cents: int, other: str) -> str:
    """Die with a name."""
    raise MemoryError(ERROR)


@tool(requires_approval=True, describe=lambda args: f"Ask {args['to']}")
def fetch(ctx: ToolContext, to: str) -> str:
    """Fetch."""
    return f"{to} 5"


def agent(name: str, *turns: Any) -> Agent:
    model, given = ScriptedModel(list(turns)), [voucher, refuse, vanish, fetch]
    return Agent(name, version=VERSION, instructions=WHY, tools=given, model=model)


@pytest.fixture
def reader(settings: Any) -> Iterator[Client]:
    """A person who may see and do all; those of the runs have names written from right to left."""
    settings.AGENTRUNS_CURRENCY = CURRENCY
    with isolated_registry():
        yield browser("superuser")


class Story:
    """Runs in which every text is, or begins with, one written from right to left."""

    def __init__(self) -> None:
        users = get_user_model().objects
        self.asks, self.decides = users.create_user(ASKS), users.create_superuser(DECIDES)

    def run(self, *turns: Any, ends: str, session: str = SESSION, name: str = AGENT) -> Run:
        """Start a run, which has to end so."""
        result = run_agent(agent(name, *turns), f"{GETS}: 5.00", session, actor=self.asks, scope=SCOPE)
        assert result.status == ends, result
        return Run.objects.get(pk=result.run_id)

    def asked(self, session: str = SESSION, **given: Any) -> Run:
        """A run that waits for two decisions, after a call that failed."""
        calls = [call("voucher", to=GETS, cents=500, **given), call("fetch", to=OTHER)]
        turns = [
            {"text": f"{GETS} 1", "tools": [call("refuse", to=OTHER, note=f"{GETS} 5")]},
            {"text": WHY, "tools": calls},
            {"text": f"**{GETS}** 5"},
        ]
        return self.run(*turns, ends="awaiting-approval", session=session, name=f"{AGENT} {session}")

    def decided(self) -> Run:
        """A run of which one call was approved and one denied, and which somebody reviewed."""
        run = self.asked("طلب 1")
        first, second = run.approvals.order_by("requested_at", "id")
        approve(first.pk, self.decides, digest=first.digest, reason=WHY)
        deny(second.pk, self.decides, WHY, digest=second.digest)
        sweep(run_id=run.pk)
        run.refresh_from_db()
        assert run.status == "completed", run.error
        given = {"rating": 1, "note": WHY, "assignee": ASKS}
        reviews.review_run(run.pk, user("superuser"), **given)
        return run

    def doubted(self) -> Run:
        """A run with a call that nobody knows the outcome of."""
        turns = {"text": WHY, "tools": [call("vanish", to=GETS, cents=500, other=OTHER)]}
        return self.run(turns, ends="orphaned", session="طلب 2", name=f"{AGENT} 2")

    def failed(self) -> Run:
        """A run that failed with an error in another script."""

        def failing(_request: Any) -> Any:
            raise ProviderError(ERROR, disposition="fail", type="x")

        return self.run(failing, ends="failed", session="طلب 3", name=f"{AGENT} 4")

    def paused(self) -> Run:
        """A run that somebody paused."""
        run = start_run(agent(f"{AGENT} 5", {"text": WHY}), f"{GETS} 5", "طلب 4", actor=self.asks)
        return pause_run(run.pk, self.decides, reason=WHY)


@pytest.fixture
def story(reader: Client) -> Story:
    return Story()


def given() -> list[str]:
    """Return every text that was given, as the database has it, and as a page says it."""
    models = (Run, Session, Approval, Message, Review, Control)
    found = set(strings([list(model._default_manager.values()) for model in models]))
    for payload in (row.payload for row in Message.objects.all()):
        content = payload.get("content")
        found |= {html.spoken(payload), html.spoken(content), html.as_text(content), *strings(payload)}
    found |= {text.replace("**", "") for text in found} | {html.reason(text) for text in found}
    said = {titled({"to": each}) for each in (GETS, OTHER)} | {ASKS, DECIDES, CURRENCY, f"{GETS} 9"}
    return [*said, *found, *(re.sub(r"\d+", "…", text) for text in found)]


def assert_apart(pages: dict[str, str]) -> None:
    """Require that on these pages no text that turns its line stands beside others."""
    known = given()
    found = {name: swapped(Lines(text).found, known) for name, text in pages.items()}
    assert "\n".join(f"{name}: {bad}" for name, bad in found.items() if bad) == ""


def page(answer: Any) -> str:
    """Return a page that was answered, and the messages on it."""
    assert answer.status_code < 500
    text: str = answer.content.decode()
    assert turns(text), "it shows what was given"
    return text


# Files and plain texts: a row for a person to copy, a table for a spreadsheet, an export for an auditor.
NO_PAGES = {"run_row", "run_csv", "run_export"}


def test_every_page_of_the_console(story: Story, reader: Client) -> None:
    runs = [story.asked(), story.decided(), story.doubted(), story.failed(), story.paused()]
    switches.switch("agent", AGENT, "off", story.decides, reason=WHY)
    shown = set()
    for run in runs:
        pages = console(reader, run)
        assert_apart({name: text for name, text in pages.items() if name not in NO_PAGES})
        shown |= {name for name, text in pages.items() if turns(text)}
    silent = {"run_news", "approval_news", "run_watch", "approval_history"}  # numbers, and who did something
    assert shown >= set(pages) - silent


def door(name: str, *args: Any) -> str:
    return reverse(f"admin:agentruns_{name}", args=args)


def test_the_pages_behind_their_buttons_and_filters(story: Story, reader: Client) -> None:
    run, other, doubted = story.asked(), story.asked("طلب 9"), story.doubted()
    failed, paused = story.failed(), story.paused()
    runs, cards = door("run_changelist"), door("approval_changelist")
    day = timedelta(days=1)
    plan_absence(story.asks, story.decides, run.created_at, run.created_at + day)
    absent = "غائب 5"
    asked = {
        "start": (door("run_start"), {"agent": run.agent, "session": SESSION}),
        "switches": (door("run_switches"), {}),
        "absences": (door("approval_absences"), {}),
        "session": (runs, {"session": run.session_id}),
        "requester": (runs, {"requester": story.asks.pk}),
        "agent": (cards, {"agent": run.agent}),
        "search": (runs, {"q": f"{GETS} 5"}),
        "no match": (runs, {"q": absent}),
        **{f"costs by {by}": (door("run_costs"), {"by": by}) for by in ("requester", "scope", "day-agent")},
    }
    pages = {name: page(reader.get(*each)) for name, each in asked.items()}
    some, every = ([str(one.pk) for one in each] for each in ((run, paused, failed), Approval.objects.all()))
    for listing, verbs, chosen in ((runs, ("cancel", "pause"), some), (cards, ("approve", "deny"), every)):
        for verb in verbs:
            sent = {"action": f"{verb}_selected", "_selected_action": chosen}
            pages[verb] = page(reader.post(listing, sent))
    assert_apart({name: text.replace(absent, GETS) for name, text in pages.items()})
    first, second = run.approvals.order_by("requested_at", "id")
    ticked = {"_selected_action": [str(one.pk) for one in other.approvals.all()], "verb": "deny"}
    ticked |= {f"digest-{one.pk}": one.digest for one in other.approvals.all()}
    call_id = doubted.messages.get(kind="tool_started").call_id
    deny = (door("approval_deny", first.pk), {"digest": first.digest, "reason": WHY})
    stale = {"seq": "0", "reason": WHY}
    posted: dict[str, tuple[str, dict[str, Any]]] = {
        "deny": deny,
        "deny another's": deny,
        "deny without": (door("approval_deny", second.pk), {"digest": second.digest, "reason": ""}),
        "turn": (door("approval_turn", other.pk), {**ticked, "reason": WHY}),
        "resolve": (door("run_resolve", doubted.pk, call_id), {"verdict": "occurred", "seq": "0"}),
        "review": (door("run_review", run.pk), {"rating": 1, "assignee": absent}),
        **{verb: (door(f"run_{verb}", paused.pk), stale) for verb in ("resume", "pause", "cancel")},
    }
    pages = {name: page(reader.post(*each, follow=True)) for name, each in posted.items()}
    pages["card"] = page(reader.get(door("approval_change", first.pk)))
    assert_apart({name: text.replace(absent, GETS) for name, text in pages.items()})


def test_what_ends_an_isolation_is_shown_and_ends_none(story: Story, reader: Client) -> None:
    assert plain(f"{GETS}\u2069 50") == f"\u2068{GETS}[U+2069] 50\u2069"
    run = story.asked(note=f"{GETS}\u2069 50 \u2067EUR")
    Session.objects.filter(pk=run.session_id).update(key=f"{GETS}\u2069 50 EUR")
    card = run.approvals.first()
    assert card is not None
    for path in (door("approval_change", card.pk), door("run_change", run.pk)):
        text = page(reader.get(path))
        assert "U+2069" in text
        assert "\u2067" not in text
        assert text.count("\u2068") == text.count("\u2069")
        assert_apart({path: text})


def test_mails(story: Story, settings: Any) -> None:
    settings.AGENTRUNS_NOTIFY_EMAILS = ["staff@example.org"]
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    story.asked(), story.doubted(), story.paused()
    for one in Notification.objects.all():
        MailNotifier()(outbox.notice_of("default", one))
    texts = [text for one in mail.outbox for text in (one.subject, *one.body.split("\n"))]
    assert len(mail.outbox) > 2
    assert sum(map(turns, texts)) > 10
    assert swapped([part for text in texts for part in contexts(text)], given()) == []


def test_a_value_that_turns_its_line_is_set_apart_and_others_are_left_as_they_are() -> None:
    for value in ("ليلى", "ליאת", "a ليلى", "\u0661", "\U0001e900"):
        assert visible(value) == f"<bdi>{value}</bdi>"
        assert plain(value) == f"\u2068{value}\u2069" == isolated(value)
        assert html.cut(f"{plain(value * 50)} asks", 40).endswith("…\u2069")
    for value in ("Ann", "5.00", "José 中文 🙂", ""):
        assert visible(value) == plain(value) == isolated(value) == value
    with translation.override("ar"):
        assert (visible("Ann"), plain("5")) == ("<bdi>Ann</bdi>", "\u20685\u2069")


def test_the_reader_of_these_tests_finds_what_is_swapped() -> None:
    apart = ("<p>ليلى</p>", "<p><bdi>ليلى</bdi> 5</p>", "\u2068ليلى\u2069 \u2068محمد\u2069 asks")
    for text, found in (("Voucher to ليلى 12", ["Voucher to ليلى 12"]), *((text, []) for text in apart)):
        assert swapped(Lines(text).found, ["ليلى", "محمد"]) == found
        assert swapped(Lines(f"<li>for ليلى</li><p title='of محمد'>{text}</p>").found, ["ليلى", "محمد"])
