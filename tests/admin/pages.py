"""Pages as the console's tests read them: what is on them, what may not be, and where they are."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

from django.urls import reverse

from agentruns.models import Approval, Message, Run

HIDDEN = "\u202e\u200b\u2066\x00\x1b\ud800"


class Page(HTMLParser):
    """What an HTML page holds: its text, its forms' fields, and what a strict CSP would refuse."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.forms: dict[str, dict[str, str]] = {}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.disabled: list[str] = []
        self.violations: list[str] = []
        self.tags: list[str] = []
        self._form: dict[str, str] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag == "style" or (tag == "script" and not values.get("src")):
            self.violations.append(f"<{tag}>")
        for name, value in values.items():
            scheme = value.strip().lower().partition(":")[0]
            if (
                name == "style"
                or name.startswith("on")
                or (name in ("href", "src") and scheme == "javascript")
            ):
                self.violations.append(f"<{tag} {name}={value!r}>")
        if tag == "form" and values.get("method") == "post":
            self._form = self.forms.setdefault(urlsplit(values.get("action", "")).path, {})
        if tag in ("input", "textarea") and "name" in values:
            self._form[values["name"]] = values.get("value", "")
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "a":
            self.links.append(values.get("href", ""))
        if tag == "button" and "disabled" in values:
            self.disabled.append(values.get("aria-describedby", ""))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(response: Any) -> Page:
    """Return a page that was answered, after checking what holds for every page of ours."""
    html = response.content.decode()
    page = Page(html)
    assert page.violations == []
    assert [
        src for src in page.loaded if not src.startswith(("/static/", "/admin/", "/tools/", "/lookout/"))
    ] == []
    assert [character for character in HIDDEN if character in html] == []
    return page


def url(obj: Run | Approval, action: str = "change", *args: Any) -> str:
    """Return the URL of a page or of a button's target."""
    return reverse(f"admin:agentruns_{obj._meta.model_name}_{action}", args=[obj.pk, *args])


def snapshot() -> Any:
    """Return everything that a page could have changed."""
    return [list(model._default_manager.order_by("pk").values()) for model in (Run, Approval, Message)]
