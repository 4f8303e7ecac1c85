"""Erasing a row in the console: it says what goes, wants a reason and the permission, and does it."""

from __future__ import annotations

import pytest

from agentruns import run_agent
from agentruns.models import Run
from tests.admin.pages import url
from tests.admin.people import browser
from tests.shop.agents import shop_agent
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_row_is_erased_by_who_may_with_a_reason() -> None:
    result = run_agent(shop_agent("one"), "SECRET-TASK", "s1", idempotency_key="s1")
    run = Run.objects.get(pk=result.run_id)
    at, erase = url(run).replace("/change/", "/at/?seq=2"), url(run).replace("/change/", "/rows/2/erase/")
    staff = browser("superuser")
    assert "/rows/2/erase/" in staff.get(at).content.decode()
    with captured_statements() as statements:
        shown = staff.get(erase).content.decode()
    assert {sql.split()[0] for sql in statements} == {"SELECT"}, "looking locks nothing"
    assert f"Row 2 (user) of run {run.pk}" in shown and "backups" in shown
    assert run.messages.get(seq=2).content is not None, "looking changes nothing"
    assert staff.post(erase, {"reason": ""}).status_code == 400
    viewer = browser("viewer")
    assert "/rows/2/erase/" not in viewer.get(at).content.decode()
    assert viewer.post(erase, {"reason": "x"}).status_code == 403
    assert staff.post(erase, {"reason": "a letter"}).status_code == 302
    row = run.messages.get(kind="payload_erased")
    assert (run.messages.get(seq=2).content, row.payload["reason"]) == (None, "a letter")
    assert "SECRET-TASK" not in staff.get(url(run)).content.decode()
    assert staff.get(url(run).replace("/change/", "/rows/99/erase/")).status_code == 409
