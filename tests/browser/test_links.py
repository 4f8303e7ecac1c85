"""The page of a link in a mail, on a telephone of somebody who is signed in nowhere."""

from __future__ import annotations

from typing import Any

from agentruns.services.approvals import links
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.browser.desk import MAIL, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitors, decided
from tests.effects import Effects


def test_a_link_is_opened_and_approved_on_a_telephone(
    desk: Desk, visit: Visitors, settings: Any, effects: Effects
) -> None:
    settings.AGENTRUNS_MAIL_LINK_SECONDS = 3600
    approval = desk.one(MAIL)
    visitor = visit("anonymous", size={"width": 390, "height": 844})
    link = f"/decide/{links.sign(approval, links.MAIL, user('superuser'))}/"
    page = visitor.open(link)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in ("Approve", "Deny"):
        box = visitor.button(name).bounding_box()
        assert box is not None
        assert box["height"] >= 44
        assert box["y"] + box["height"] <= 844, "at first sight"
    assert_sound(page)
    with visitor.refused():
        visitor.click(visitor.button("Deny"))
        visitor.wait_for("A denial needs a reason")
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved by superuser")
    assert decided(approval) == ("approved", "superuser")
    sweep()
    assert effects.count() == 1
