"""The two weeks before the demo: made by the same code, and as sound as what happens today."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.demo_project import Project

PREPARE = (
    "from project.helpdesk.preparation import prepare; prepare(); from project.helpdesk import audit; "
    "print(audit.findings())"
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("past"))
    prepared = project.run("shell", "-v0", "-c", f"{PREPARE}; {PREPARE}")  # the second changes nothing
    assert (prepared.stdout, prepared.stderr) == ("[]\n[]\n", "")
    return project


def test_some_ended_well_some_failed_some_wait_in_two_weeks(shop: Project) -> None:
    runs = [json.loads(line) for line in shop.run("list_runs", "--json").stdout.splitlines()]
    assert Counter((run["agent"], run["status"]) for run in runs) == {
        ("digest", "completed"): 14,
        ("helpdesk", "completed"): 31,
        ("helpdesk", "failed"): 2,
        ("helpdesk", "awaiting-approval"): 5,
        ("helpdesk", "paused"): 3,
    }
    days = {datetime.fromisoformat(run["created_at"]) for run in runs}
    assert max(days) < datetime.now(UTC)
    assert timedelta(days=13) < datetime.now(UTC) - min(days) < timedelta(days=15)
    assert len({day.date() for day in days}) == 14


def test_every_journal_is_sound_and_every_effect_happened_once(shop: Project) -> None:
    verified = shop.run("verify_journal")
    assert verified.returncode == 0, verified.stdout
    lines = [json.loads(line) for line in (Path(shop.folder) / "effects.jsonl").read_text().splitlines()]
    assert Counter(line["kind"] for line in lines) == {"email": 31, "refund": 9, "voucher": 11}
    assert set(Counter(line["key"] for line in lines).values()) == {1}
    assert not list(Path(shop.folder).glob("**/*.log")), "the mail folder is for the demo's own"


BROWSER = """
import json, re
from django.test import Client
from project.helpdesk.preparation import demo_user

client = Client(headers={"host": "localhost"})
client.force_login(demo_user())

def get(where):
    return client.get(where.replace("&amp;", "&")).content.decode()
"""
LOOK = """
found = re.findall('href="([^"]*started_to=[^"]*)">([0-9]+)<', get("/admin/"))
days = [[int(count), get(where).count('class="action-select"')] for where, count in found]
print(json.dumps([days, get("/admin/agentruns/run/start/")]))
"""


def test_the_front_page_leads_to_the_runs_of_each_day_and_a_start_tells_of_transcripts(shop: Project) -> None:
    days, page = json.loads(shop.python(BROWSER + LOOK))
    assert len(days) >= 7, "and those that failed"
    assert sum(count for count, _listed in days) > 14
    assert all(count == listed for count, listed in days), days
    assert "follows a transcript for each of the tickets 1 to 5 and 7" in page
    assert page.index("tickets 1 to 5") < page.index('name="text"')


CARDS = """
pages = []
for row in agentruns.models.Approval.objects.filter(status="pending").order_by("requested_at"):
    pages.append(get(f"/admin/agentruns/approval/{row.pk}/change/"))
print(json.dumps(pages))
"""


def test_the_cards_that_wait_show_a_suggestion_a_change_and_who_was_read(shop: Project) -> None:
    pages = json.loads(shop.python(BROWSER + CARDS))
    texts = [" ".join(re.sub("<[^>]*>", "", page).split()) for page in pages]
    (voucher,) = [text for text in texts if "Draft a rule from them" in text]
    assert "10 calls like this one were approved, none denied." in voucher
    (changed,) = [text for text in texts if "is 'delivered' now." in text.replace("&#x27;", "'")]
    assert "status was 'shipped' when this was approved" in changed.replace("&#x27;", "'")
    assert "left to refund = 349.00 EUR, status = delivered" in changed
    (misled,) = [text for text in texts if "text that outsiders wrote" in text]
    assert "read by read_mail" in misled
    assert "do not mention this note" in misled
    assert len(texts) == 6, "the other three ask because refund requires approval"


RULE = """
card = agentruns.models.Approval.objects.get(status="pending", tool_name="send_voucher")
here = client.post(f"/admin/agentruns/approval/{card.pk}/draft-rule/").headers["Location"]
tried = [client.post(here.replace("change", "backtest")).content.decode()]
rule = agentruns.models.ApprovalRule.objects.get()
wider = [{**each, "value": 4000} if each["op"] == "<=" else each for each in rule.conditions]
about = {"agent": rule.agent, "tool": rule.tool, "name": rule.name}
wide = agentruns.draft_rule(user, conditions=wider, **about)
there = here.replace("change", "backtest").replace(str(rule.pk), str(wide.pk))
tried.append(client.post(there).content.decode())
agentruns.activate_rule(rule.pk, user)
result = agentruns.run_agent("helpdesk", "Please handle ticket 7", "ticket-7")
print(json.dumps([str(rule), tried, result.status, result.output]))
"""


def test_the_suggestion_becomes_a_rule_that_decides_the_next_voucher(shop: Project, tmp_path: Path) -> None:
    project = Project(shutil.copytree(shop.folder, tmp_path / "copy"))
    rule, (narrow, wide), status, output = json.loads(project.python(BROWSER + RULE))
    assert "Would have approved 10 of 13 cards; people decided differently in 0." in narrow
    assert "Would have approved 12 of 13 cards; people decided differently in 2." in wide
    for title in ("Voucher of 30.00 EUR to Farid Haddad", "Voucher of 25.00 EUR to Ben Okafor"):
        assert title in wide
        assert title not in narrow
    assert (status, output.split(";")[0]) == ("completed", "Order 1007 came a week late")
    decided = "print(run('ticket-7').approvals.get().decided_by_name)"
    assert project.python(decided) == f"rule:{rule}\n"
