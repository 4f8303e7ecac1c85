"""Nobody finds a hidden value by trying all of them against the hashes that are shown."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from django.core import mail

from agentruns import Agent, approve, export_run, run_agent, tool
from agentruns.journal.outbox import Notice
from agentruns.models import Approval, Message, Run
from agentruns.models.tombstone import keyed
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.utils import json as canonical
from tests.api.http import Api, make_user
from tests.commands.running import run as command
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

PIN, CARD = "7306", "4242420123451843"
# Of all there are, a few around the true one: who does not find it among these does not find it among all.
PINS = ["7305", PIN, "7307"]
CARDS = ["4242420123451842", CARD, "4242420123451844"]
# Ids, hashes and fractions of seconds hold any four digits by chance.
RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{16,128}\b|\.\d{3,6}\b|\d{10}\.\d+"
)
HEX = re.compile(r"\b[0-9a-f]{16,128}\b")
# Of a log record: they too hold any four digits by chance.
NUMBERS = {"created", "lineno", "msecs", "process", "relativeCreated", "thread"}
MASKS = ("***", "[card]")

told: list[str] = []


class Recorder:
    """Keeps what it is told, as a webhook would send it."""

    def __call__(self, notice: Notice) -> None:
        told.append(json.dumps(notice.payload()))


def hide(text: str) -> str:
    return re.sub(r"\b\d{16}\b", "[card]", text)


@tool(requires_approval=True, sensitive=["pin"])
def open_door(pin: str) -> str:
    """Open a door."""
    return "open"


@tool(requires_approval=True)
def charge(card: str) -> str:
    """Charge a card."""
    return f"charged {card}"


def story(settings: Any) -> Run:
    """Both tools are called, approved and run; each call is decided on before."""
    settings.AGENTRUNS_REDACT = f"{__name__}.hide"
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.Recorder", "agentruns.contrib.mail.MailNotifier"]
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    told.clear()
    turns = [{"tools": [call("open_door", pin=PIN), call("charge", card=CARD)]}, {"text": "Done."}]
    agent = Agent("doors", instructions="Open.", tools=[open_door, charge], model=ScriptedModel(turns))
    result = run_agent(agent, "open it", "s1", idempotency_key=f"k {CARD}")
    for card in result.pending:
        approve(card.pk, None)
    sweep()
    assert Run.objects.get().status == "completed"
    return Run.objects.get()


def shown(run: Run, settings: Any, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Return every text that somebody without `reveal_arguments` gets to see of a run."""
    api, texts = Api(make_user("reader", "view_run", "view_approval", "view_message", is_staff=True)), {}
    paths = [f"/runs/{run.pk}", f"/runs/{run.pk}/messages?limit=100", "/runs", "/approvals?status=consumed"]
    for path in [*paths, *(f"/approvals/{one.pk}" for one in Approval.objects.all())]:
        api.get(path)
        texts[path] = api.response.content.decode() + str(dict(api.response.headers))
    stream: Any = api.client.get(f"/api/runs/{run.pk}/events")
    texts["stream"] = stream.getvalue().decode()
    for path in [f"agentruns/run/{run.pk}/change/", "agentruns/run/", "agentruns/approval/"]:
        texts[path] = api.client.get(f"/admin/{path}").content.decode()
    texts["export"] = "".join(json.dumps(line) + "\n" for line in export_run(run.pk))
    texts["show_run"] = command("show_run", str(run.pk), "--json").out + command("show_run", str(run.pk)).out
    texts["notifications"] = "\n".join(told)
    texts["mail"] = "\n".join(f"{one.subject}\n{one.body}" for one in mail.outbox)
    texts["log"] = "\n".join(
        str({name: value for name, value in vars(record).items() if name not in NUMBERS})
        for record in caplog.records
    )
    return texts


def objects(value: Any) -> Iterator[Any]:
    """Yield a JSON value and every value in it, texts that are JSON parsed too."""
    yield value
    if isinstance(value, dict):
        for one in value.values():
            yield from objects(one)
    elif isinstance(value, list):
        for one in value:
            yield from objects(one)
    elif isinstance(value, str) and value[:1] in "{[":
        try:
            yield from objects(json.loads(value))
        except ValueError:
            return


def templates(texts: Iterable[str]) -> set[str]:
    """Return canonical texts in which the hidden value is missing: of whatever is shown with a mask."""
    found = {
        canonical.dumps({"tool": "open_door", "arguments": {"pin": "***"}}),
        canonical.dumps({"tool": "charge", "arguments": {"card": "***"}}),
        canonical.dumps({"pin": "***"}), canonical.dumps({"card": "***"}), "***",
    }  # fmt: skip
    for text in texts:
        for line in text.splitlines():
            try:
                values = list(objects(json.loads(line.removeprefix("data: "))))
            except ValueError:
                continue
            for value in values:
                if isinstance(value, dict | list):
                    found.add(canonical.dumps(value))
                elif isinstance(value, str):
                    found.add(value)
    masked = {one for one in found if any(mask in one for mask in MASKS)}
    for mask in MASKS:
        masked = {one.replace(mask, "***") for one in masked}
    return {one for one in masked if len(one) < 4_000}


def guessed(texts: dict[str, str], values: list[str], more_keys: Iterable[str] = ()) -> set[str]:
    """Return the values whose hash is among what is shown, plain, salted or keyed with anything shown."""
    everything = "\n".join(texts.values())
    hashes = set(HEX.findall(everything))
    keys = [bytes.fromhex(one) for one in more_keys]
    found = set()
    for template in templates(texts.values()):
        for value in values:
            text = template.replace("***", value).encode()
            tries = [hashlib.sha256(text).hexdigest(), hashlib.md5(text).hexdigest()]
            for key in keys:
                tries += [hashlib.sha256(key + text).hexdigest(), hmac.digest(key, text, "sha256").hex()]
            if any(one in hashes or one[:16] in hashes for one in tries):
                found.add(value)
    return found


def test_a_key_that_repeats_a_sensitive_value_is_hidden_with_its_hash(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key, turns = "open-998877", [{"tools": [call("open_door", pin="998877")]}, {"text": "ok"}]
    agent = Agent("doors", instructions="Open.", tools=[open_door], model=ScriptedModel(turns))
    (card,) = run_agent(agent, "open it", "s1", idempotency_key=key).pending
    approve(card.pk, None)
    sweep()
    texts = shown(Run.objects.get(), settings, caplog)
    hidden = (key, hashlib.sha256(key.encode()).hexdigest(), keyed(key).removeprefix("hmac:"))
    assert [place for place, text in texts.items() if any(word in text for word in hidden)] == []
    assert "open-***" in texts["/runs"], "the mask, not the place, hides the key"


def test_no_hidden_value_is_found_by_trying(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    texts = shown(story(settings), settings, caplog)
    said = {place: RANDOM.sub("", text) for place, text in texts.items()}
    assert {place for place, text in said.items() if PIN in text or CARD in text} == set()
    keys = {one for one in HEX.findall(texts["export"]) if len(one) in (32, 64)}
    secret = Run.objects.get().session.secret
    for value, values in ((PIN, PINS), (CARD, CARDS)):
        assert guessed(texts, values, keys) == set()
        assert guessed(texts, values, [secret]) == {value}, "the attacker is no fool: with the session's key"
    everything = "\n".join(texts.values())
    assert secret not in everything
    payloads = [(row, json.dumps(row.payload)) for row in Message.objects.all()]
    hiding = [row for row, text in payloads if PIN in RANDOM.sub("", text) or CARD in text]
    assert len(hiding) >= 4
    assert not [row.kind for row in hiding if row.content_salt in everything]
    assert not [one.pk for one in Approval.objects.all() if one.same_call in everything]
