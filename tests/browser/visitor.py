"""A person at a browser: what they see and press, and what their browser complains about meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.urls import reverse
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, Response, Route

from agentruns.models import Approval, Run
from tests.admin.people import browser as client_of

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 375, "height": 812}
PATIENCE = 180_000  # milliseconds: the limit of every wait, for machines that are busy or slow
QUEUE = "/admin/agentruns/approval/"
INDEX = "/admin/"
LOGIN = "/admin/login/"
RUNS = "/admin/agentruns/run/"
# On how many lines the text of an element stands.
LINES = """element => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const boxes = [...range.getClientRects()].filter(({ width }) => width > 1);
    let [count, bottom] = [0, -Infinity];
    for (const box of boxes.sort((one, other) => one.top - other.top)) {
        count += (box.top + box.bottom) / 2 > bottom;
        bottom = Math.max(bottom, box.bottom);
    }
    return count;
}"""
# Stands for other fonts: those of this machine may be the narrowest or the widest there are.
WIDE_LETTERS = "* { letter-spacing: 0.1em !important; }"
NOTHING = "/static/agentruns/moment.js"  # a page that runs and asks nothing
REASON = "Note, kept in the journal"


class Visitor:
    """One page of one person. Everything a browser reports as wrong is in `complaints`."""

    def __init__(self, context: BrowserContext, base: str, options: dict[str, Any]) -> None:
        self.context = context
        self.base = base
        self.options = options
        self.complaints: list[str] = []
        self.clicks = 0
        self.expected: set[int] = set()
        self.under_way: list[Request] = []  # until they are answered
        self.late: list[tuple[Request, int]] = []  # begun in a block that expects a status, answered after it
        context.set_default_timeout(PATIENCE)
        self.page = context.new_page()
        self._watch(self.page)

    # What they do

    def open(self, where: str | Any) -> Page:
        """Go to a path, or to the page of an object."""
        self.page.goto(self.base + (where if isinstance(where, str) else path_of(where)))
        return self.page

    def click(self, what: Locator) -> None:
        """Click, and count it."""
        self.clicks += 1
        what.click()

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    def unfold(self) -> None:
        """Open everything that is folded."""
        self.page.locator("#content details").evaluate_all(
            "all => all.forEach(details => details.open = true)"
        )

    def choose(self, verb: str, **fields: str) -> None:
        """Decide on the page that is open: unfold what the verb needs, fill it in, press its button."""
        form = self.form(verb)
        fold = form.locator("xpath=ancestor::details[not(@open)]/summary")
        if fold.count():
            shown = fold.is_visible()  # else a link of the bar opens it
            self.click(fold if shown else self.page.locator(".ar-bar a[href^='#']"))
        for label, value in fields.items():
            field = form.get_by_label(label)
            if field.evaluate("element => element.tagName") == "SELECT":
                field.select_option(label=value)
            else:
                field.fill(value)
        pressed = form.locator("button[type=submit]")
        self.click(pressed if pressed.count() == 1 else form.get_by_role("button", name=named(verb)))

    def form(self, verb: str) -> Locator:
        """Find the form of a verb: what it is folded under says so, or else its button."""
        summary = self.page.locator("summary", has_text=re.compile(rf"^\s*{re.escape(verb)}…"))
        folded = self.page.locator("#content details").filter(has=summary)
        if folded.count():
            return folded.locator("form")
        return self.page.locator("#content form").filter(has=self.button(verb, include_hidden=True))

    def row(self, approval: Approval) -> Locator:
        """Find what a page of several approvals has of one."""
        key = str(approval.pk)
        about = f"input[value='{key}'], input[name^='{key}']"
        return self.page.locator("tr, fieldset, li").filter(has=self.page.locator(about))

    def select_all(self) -> None:
        """Mark every row of a list."""
        for box in self.page.locator("input[name=_selected_action]").all():
            box.check()

    def act(self, action: str) -> None:
        """Send the marked rows of a list to an action."""
        choice = self.page.get_by_label("Action:")
        label = choice.locator("option").filter(has_text=action).inner_text()
        choice.select_option(label=label)
        self.click(self.page.locator("button[name=index]"))  # its name differs between Djangos

    def button(self, name: str, **options: Any) -> Locator:
        """Find the button of this name; what it does, or its key, may stand behind."""
        return self.page.get_by_role("button", name=named(name), **options)

    def link(self, name: str) -> Locator:
        return self.page.get_by_role("link", name=name).first

    def resize(self, size: Any) -> None:
        """Give the window another size."""
        self.page.set_viewport_size(size)

    def tidy_up(self) -> None:
        """Forget everything but what is cached, and be ready for somebody else."""
        self.page.unroute_all()
        self.resize(self.options["viewport"])
        self.open(NOTHING)  # of the same server, whose storage can be emptied from there alone
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.context.clear_cookies()
        self.complaints.clear()
        self.expected.clear()
        self.under_way.clear()
        self.late.clear()
        self.clicks = 0

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Assert that the block makes the page ask the server for nothing, and go nowhere."""
        requests: list[str] = []

        def note(request: Request) -> None:
            requests.append(urlsplit(request.url).path)

        self.page.on("request", note)
        yield
        self.ask_for_nothing()
        self.page.remove_listener("request", note)
        assert requests == [NOTHING]

    def ask_for_nothing(self) -> None:
        """Let the page fetch a file: what the page began before is sent by then."""
        self.page.evaluate("path => fetch(path, {cache: 'no-store'}).then(answer => answer.text())", NOTHING)

    # What they see

    @property
    def text(self) -> str:
        """The text of the page, as it is laid out."""
        return self.page.locator("body").inner_text()

    @property
    def path(self) -> str:
        """Where they are."""
        return urlsplit(self.page.url).path

    def wait_for(self, text: str) -> None:
        """Wait until a text is on the page."""
        self.page.get_by_text(text).first.wait_for()

    def wait_until_at(self, where: str | Any) -> None:
        """Wait until the page of an object is there."""
        path = where if isinstance(where, str) else path_of(where)
        self.page.wait_for_url(lambda url: urlsplit(url).path == path)

    @contextmanager
    def refused(self, status: int = 409) -> Iterator[None]:
        """The block ends on a page that was answered with `status`; else that is a complaint."""
        self.expected.add(status)
        with self.page.expect_response(lambda answer: answer.status == status):
            yield
        self.page.wait_for_load_state()
        self.expected.discard(status)
        self.late += [(request, status) for request in self.under_way]

    # What their browser says

    def _watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"error of a script: {error}"))
        page.on("request", lambda request: self.under_way.append(request))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        by_status = message.text.startswith("Failed to load resource")  # `_answered` says it better
        if message.type in ("error", "warning") and not by_status:
            self.complaints.append(f"{message.type} in the console: {message.text}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the person went on before it was there
            self.complaints.append(f"request failed: {request.url}: {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.request in self.under_way:
            self.under_way.remove(response.request)
        is_expected = response.status in self.expected or (response.request, response.status) in self.late
        if response.status >= HTTPStatus.BAD_REQUEST and not is_expected:
            self.complaints.append(f"answered {response.status}: {response.request.method} {response.url}")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()


class Visitors:
    """Lets people in, each with a browser of their own, which somebody else may have left as good as new."""

    def __init__(self, chromium: Browser, base: str) -> None:
        self.chromium, self.base = chromium, base
        self.has_wide_letters = False  # for those who are let in from now on
        self.inside: list[Visitor] = []
        self.gone: list[Visitor] = []

    def __call__(
        self,
        role: str = "superuser",
        *,
        scheme: Any = "light",
        size: Any = WIDE,
        javascript: bool = True,
        clock: bool = False,
    ) -> Visitor:
        """Let in somebody of a role, logged in unless anonymous.

        With `clock`, the test may move the clock of the page: `page.clock.fast_forward(milliseconds)`.
        """
        options = {"color_scheme": scheme, "viewport": size, "java_script_enabled": javascript}
        options |= {"clock": clock, "wide letters": self.has_wide_letters}
        visitor = self._visitor(options)
        if role != "anonymous":
            cookie = client_of(role).cookies[settings.SESSION_COOKIE_NAME].value
            session = {"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": self.base}
            visitor.context.add_cookies([session])
        self.inside.append(visitor)
        return visitor

    def leave(self) -> list[str]:
        """Let everybody go and return what their browsers complained about."""
        inside, self.inside = self.inside, []
        self.has_wide_letters = False
        for visitor in inside:
            visitor.page.wait_for_timeout(0)  # what was reported meanwhile comes in
        complaints = [complaint for visitor in inside for complaint in visitor.complaints]
        for visitor in inside:
            visitor.tidy_up()
        self.gone += inside
        return complaints

    def _visitor(self, options: dict[str, Any]) -> Visitor:
        # To start a browser and to fetch every script and style sheet again costs more than most tests.
        for number, visitor in enumerate(self.gone):
            if visitor.options == options:
                return self.gone.pop(number)
        of_context = {name: value for name, value in options.items() if name not in ("clock", "wide letters")}
        context = self.chromium.new_context(**of_context, locale="en-US")
        if options["clock"]:
            context.clock.install()
        if options["wide letters"]:
            context.route("**/agentruns/admin.css", _widen)
        return Visitor(context, self.base, options)


def _widen(route: Route) -> None:
    response = route.fetch()
    route.fulfill(response=response, body=response.text() + WIDE_LETTERS)


def named(name: str) -> re.Pattern[str]:
    """Match a button of this name; what it does, or its key, may stand behind."""
    return re.compile(rf"^{re.escape(name)}(:| [A-Z]$|$)")


def call_path(run: Run, call_id: str) -> str:
    """Build the path of a call that nobody knows the outcome of."""
    return f"{RUNS}{run.pk}/calls/{call_id}/"


def turn_path(run: Run) -> str:
    return f"{QUEUE}turn/{run.pk}/"


def path_of(obj: Any) -> str:
    return reverse(f"admin:agentruns_{obj._meta.model_name}_change", args=[obj.pk])


def decided(approval: Approval) -> tuple[str, str]:
    """Read what an approval is now, and by whom."""
    approval.refresh_from_db()
    return approval.status, approval.decided_by_name
