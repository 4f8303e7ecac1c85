"""Pages as the console's tests read them: what is on them, what may not be, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns.models import Approval, Message, Run
from tests.admin.people import browser

HIDDEN = "\u202e\u200b\u2066\x00\x1b\ud800"


class Page(HTMLParser):
    """What an HTML page holds: its text, its forms' fields, and what a strict CSP would refuse."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html, self.text = html, ""
        self.forms: dict[str, dict[str, str]] = {}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.disabled: list[str] = []
        self.violations: list[str] = []
        self.tags: list[str] = []
        self._form: dict[str, str] = {}
        self._area = ""
        self._select = ""
        self._table = ""
        self._rows: dict[str, list[list[str]]] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag == "style" or (tag == "script" and not values.get("src")):
            self.violations.append(f"<{tag}>")
        for name, value in values.items():
            scheme = value.strip().lower().partition(":")[0]
            is_script = name in ("href", "src") and scheme == "javascript"
            if name == "style" or name.startswith("on") or is_script:
                self.violations.append(f"<{tag} {name}={value!r}>")
        if tag == "form" and values.get("method") == "post":
            self._form = self.forms.setdefault(urlsplit(values.get("action", "")).path, {})
        if tag in ("input", "textarea") and "name" in values:
            self._form[values["name"]] = values.get("value", "")
        self._area = values.get("name", "") if tag == "textarea" else ""
        if tag == "select":
            self._select = values.get("name", "")
        if tag == "option" and "selected" in values:
            self._form[self._select] = values.get("value", "")
        self._cell(tag, values)
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "a":
            self.links.append(values.get("href", ""))
        if tag == "button" and values.get("formaction"):  # sends what its form holds elsewhere
            self.forms[urlsplit(values["formaction"]).path] = self._form
        if tag == "button" and "disabled" in values:
            self.disabled.append(values.get("aria-describedby", ""))

    def _cell(self, tag: str, values: dict[str, str]) -> None:
        if tag == "table":
            self._table = values.get("class", "")
        elif tag == "tr" and self._table:
            self._rows.setdefault(self._table, []).append([])
        elif tag in ("td", "th") and self._table:
            self._rows[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self._area = ""
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._area:  # the line break after the tag belongs to the tag
            self._form[self._area] += data if self._form[self._area] else data.removeprefix("\n")
        if self._table and self._rows.get(self._table) and self._rows[self._table][-1]:
            self._rows[self._table][-1][-1] += data.strip()

    def cells(self, table: str) -> list[list[str]]:
        """Return the rows of the table of this class, without its head."""
        return self._rows[table][1:]


def read(response: Any) -> Page:
    """Return a page that was answered, after checking what holds for every page of ours."""
    html = response.content.decode()
    page = Page(html)
    assert page.violations == []
    ours = ("/static/", "/admin/", "/tools/", "/lookout/")
    assert [src for src in page.loaded if not src.startswith(ours)] == []
    assert [character for character in HIDDEN if character in html] == []
    return page


def says(response: Any, *texts: str, status: int = 200) -> Page:
    """Read a page that was answered, after checking its status and that it says these texts."""
    page = read(response)
    assert response.status_code == status
    assert [text for text in texts if text not in page.text] == []
    return page


def look(obj: Run | Approval, *texts: str, role: str = "superuser", query: str = "") -> Page:
    """Read the page of a run or an approval as somebody of a role, and check that it says these texts."""
    return says(browser(role).get(url(obj) + query), *texts)


def listed(model: str, role: str = "superuser", **query: str) -> Page:
    """Read a list as somebody of a role."""
    return says(browser(role).get(reverse(f"admin:agentruns_{model}_changelist"), query))


def words(page: Page) -> str:
    """Return the text of a page with single spaces."""
    return " ".join(page.text.split())


def text(run: Run, query: str = "") -> str:
    """Read what the page of a run says, with single spaces."""
    return words(look(run, query=query))


def leads_to(page: Page) -> list[str]:
    """Return the pages of runs and approvals that a page links to, each once."""
    return list(dict.fromkeys(link.split("?")[0] for link in page.links if "/change/" in link))


def url(obj: Run | Approval, action: str = "change", *args: Any) -> str:
    """Return the URL of a page or of a button's target."""
    return reverse(f"admin:agentruns_{obj._meta.model_name}_{action}", args=[obj.pk, *args])


def send(approval: Approval, verb: str, role: str = "superuser", follow: bool = False, **data: Any) -> Any:
    """Press a button of a card as it is now."""
    return browser(role).post(url(approval, verb), {"digest": approval.digest, **data}, follow=follow)


def snapshot() -> Any:
    """Return everything that a page could have changed."""
    return [list(model._default_manager.order_by("pk").values()) for model in (Run, Approval, Message)]


@contextmanager
def unchanged() -> Iterator[None]:
    """Require that what is done inside changes no run, approval or row of a journal."""
    before = snapshot()
    yield
    assert snapshot() == before


def queries(ask: Callable[[], Any]) -> list[str]:
    """List what a call asks the database on the connection of this thread."""
    with CaptureQueriesContext(connection) as captured:
        ask()
    return [one["sql"] for one in captured]
