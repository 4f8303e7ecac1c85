"""`POST /runs/{id}/rows/{seq}/erase`."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, cancel_run, start_run
from agentruns.models import Message
from tests.api.http import Api
from tests.db.helpers import user


def test_a_row_is_erased_with_permission_and_reason(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "SECRET-TASK", "s1", actor=owner)
    path, body = f"/runs/{run.pk}/rows/2/erase", {"reason": "a letter"}
    assert api.post(path, body)[0] == 403, "the owner may not by owning it"
    staff = Api(user("eraser", "erase_payload", "view_run"))
    assert staff.post(path, {"reason": " "})[0] == 422
    status, problem = staff.post(path, body)
    assert (status, problem["type"]) == (409, "urn:agentruns:run-state"), "it has not ended"
    cancel_run(run.pk)
    status, answer = staff.post(path, {**body, "idempotency_key": "once"})
    assert (status, answer["input"]) == (200, "[erased]")
    assert "SECRET-TASK" not in str(staff.get(f"/runs/{run.pk}/messages"))
    assert staff.post(path, {**body, "idempotency_key": "once"})[0] == 200
    assert Message.objects.filter(kind="payload_erased").count() == 1
    assert staff.post(f"/runs/{run.pk}/rows/999/erase", body)[0] == 409
    assert Api(user("other", "erase_payload")).post(path, body)[0] == 404
