"""Starting a run from the console: by whom, what, and that a refusal keeps what was typed."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from agentruns import Policy, cancel_run, start_run
from agentruns.content import type_of
from agentruns.journal.policy import Quota
from agentruns.models import Run
from tests.admin.pages import look, read, says, url
from tests.admin.people import browser, user
from tests.pictures import UNFIT, png
from tests.redacting import HIDE, KEY
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db
START = "/admin/agentruns/run/start/"


@pytest.fixture(autouse=True)
def agents() -> None:
    shop_agent("helper", {"text": "done"}, starters="anyone")
    shop_agent("boss", {"text": "done"}, starters="nobody-is-in-this-group")


def form(role: str = "superuser", **query: str) -> dict[str, str]:
    forms = read(browser(role).get(START, query)).forms
    return forms[START] if START in forms else forms[""]


def post(role: str = "superuser", **data: Any) -> Any:
    return browser(role).post(START, {"agent": "helper", "text": "Mend it", "key": "k1", **data})


def kept(response: Any, status: int, *texts: str) -> None:
    """Require that a start was refused with these texts, and that what was typed is there."""
    page = says(response, *texts, status=status)
    assert "Mend it" in page.text or "Mend it" in str(page.forms)


def test_a_run_is_queued_for_the_user_and_its_page_opens() -> None:
    response = post("viewer", session="ticket-1")
    run = Run.objects.get()
    assert (response.status_code, response.url) == (302, url(run))
    assert (run.owner_name, run.agent, run.input, run.status) == ("viewer", "helper", "Mend it", "queued")
    assert run.session.key == "ticket-1"
    assert post("viewer", session="ticket-1").url == url(run), "a double click is one run"
    assert Run.objects.count() == 1
    assert post("viewer", key="k2").status_code == 302
    assert Run.objects.exclude(session__key="ticket-1").get().input == "Mend it"


def test_only_agents_that_one_may_start_are_offered(settings: Any) -> None:
    assert "boss" not in says(browser("viewer").get(START), "helper").text
    front = ("/admin/", "/admin/agentruns/run/")
    for where in front:
        assert START in read(browser("viewer").get(where)).links
    kept(post("viewer", agent="boss"), 400)
    assert Run.objects.count() == 0
    for role, status in {"decider": 403, "staff": 403, "anonymous": 302}.items():
        assert browser(role).get(START).status_code == post(role).status_code == status
    assert form(agent="helper", session="t")["session"] == "t"
    settings.AGENTRUNS_POLICY = f"{__name__}.Closed"
    assert browser("viewer").get(START).status_code == 403
    for where in front:
        assert START not in read(browser("viewer").get(where)).links


class Closed(Policy):
    def can_start(self, user: Any, agent: Any) -> bool:
        """Let nobody start anything."""
        return False


def test_files_come_after_the_text_and_refusals_keep_it(settings: Any) -> None:
    picture = SimpleUploadedFile("lamp.png", png(), "image/png")
    note = SimpleUploadedFile("note.txt", b"it is broken", "text/plain")
    response = post(attached=[picture, note])
    assert response.status_code == 302, response.context["form"].errors
    content = str(Run.objects.get().messages.get(kind="user").content)
    assert "lamp.png" in content and "note.txt" in content
    bad = SimpleUploadedFile("<b>.png", b"no picture", "image/png")
    kept(post(key="k2", attached=[bad]), 409, "Choose the files again")
    for name, data, why in UNFIT.values():
        kept(post(key="k2", attached=[SimpleUploadedFile(name, data, type_of(data))]), 409, why, name)
    assert Run.objects.count() == 1
    start_run("helper", "something else", "theirs", actor=user("decider"))
    kept(post("viewer", session="theirs"), 409, "There is no session", "it is not yours to write in")
    own = start_run("helper", "something else", "busy", actor=user("viewer"))
    kept(post("viewer", session="busy"), 409, str(own.pk))
    assert post("viewer", text=" ").status_code == post("viewer", key="").status_code == 400
    settings.AGENTRUNS_POLICY = f"{__name__}.Once"
    assert post("viewer", key="k3").status_code == 302
    kept(post("viewer", key="k4"), 409, "may start 1 runs in an hour")
    assert Run.objects.count() == 4


class Once(Policy):
    def quota(self, user: Any, agent: Any) -> Quota:
        """Let each start one run in an hour."""
        return Quota(runs=1)


class Narrow(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Show everybody their own."""
        return runs.filter(owner_id=str(user.pk))


def test_a_new_run_begins_from_the_task_of_one_that_was_cancelled(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Narrow"
    run = start_run("helper", "Mend the lamp of order 4107", "s1", actor=user("superuser"))
    cancel_run(run.pk, reason="no need")
    assert f"task={run.pk}" in " ".join(look(run).links)
    assert form(task=str(run.pk))["text"].strip() == run.input
    assert form("viewer", task=str(run.pk))["text"].strip() == ""
    assert form(task="nonsense")["text"].strip() == ""
    settings.AGENTRUNS_REDACT = HIDE  # a hidden part of a task is in no form
    run = start_run("helper", f"Mend it. {KEY}", "s2", actor=user("superuser"))
    assert form(task=str(run.pk))["text"].strip() == ""
