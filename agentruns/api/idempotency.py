"""Idempotency keys: a repeated request is not executed again; its answer shows the current state."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest
from ninja import Status
from ninja.params.models import Header
from pydantic import BaseModel

from agentruns.api.auth import entry_of, user_of
from agentruns.api.errors import Problem
from agentruns.api.schemas import Keyed
from agentruns.conf import settings
from agentruns.models import IdempotencyRecord, SessionBearer
from agentruns.utils import json as canonical
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import redact

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

KEY: Any = Header(None, alias=HEADER, description="as the member `idempotency_key`; give one, or both alike")


def key_of(header: str | None, body: Keyed | None) -> str | None:
    """Read a request's key from header or body; None without a key, Problem (422) if the two differ."""
    member = body.idempotency_key if body else None
    if header is not None and member is not None and header != member:
        detail = f"The header {HEADER} and the member idempotency_key differ. Give one of them."
        where = [{"loc": ["header", HEADER], "msg": detail, "type": "mismatch"}]
        raise Problem.named("validation", detail, errors=where)
    return header if header is not None else member


def once(
    request: HttpRequest,
    header: str | None,
    body: Keyed | None,
    act: Callable[[], BaseModel],
    again: Callable[[], BaseModel],
) -> Any:
    """Execute a request by `act`; answer a repeated request with the same key by `again`.

    No answer is stored: `again` checks anew what the caller may do and see. `act` and the record of the key
    are one transaction, so the record exists exactly if the request was executed, and concurrent requests
    wait for it. An error leaves no record. Raises Problem (409) for a key of another request.
    """
    if (key := key_of(header, body)) is None:
        return act()
    user = user_of(request)
    if isinstance(user, SessionBearer):
        detail = "A visitor's decision takes no idempotency key: a repeated one is 409, with who decided."
        raise Problem.named("validation", detail)
    given = body.model_dump(exclude={"idempotency_key"}) if body else {}
    fingerprint = canonical.digest([request.method, request.path, given])
    records = IdempotencyRecord.objects.using(settings.DATABASE)

    def answer() -> Any:
        # DO NOTHING waits for a concurrent request with this key, and leaves the transaction usable.
        mine = IdempotencyRecord(owner_id=user.pk, key=key, fingerprint=fingerprint)
        records.bulk_create([mine], ignore_conflicts=True)
        record = records.get(owner_id=user.pk, key=key)
        if record.fingerprint != fingerprint:
            raise Problem.named(
                "idempotency-key",
                f"Idempotency key {redact(record.key)!r} was given with another method, path or body. "
                "Use a new key for a new request, or repeat the first one unchanged.",
                answered_at=record.created_at,
            )
        if record.status:  # without a status, this transaction made the record
            repeated = again()
            entry_of(request).headers[record.status] = {REPLAYED: "true"}
            return Status(record.status, repeated)
        done: Any = act()
        run_id = getattr(done, "run", None) or done.id  # `done` names a run, or is a run
        unanswered = records.filter(pk=record.pk, status=0)
        if unanswered.update(status=HTTPStatus.OK, run_id=run_id) != 1:
            raise AssertionError(f"The record of idempotency key {key!r} was answered or removed meanwhile.")
        return done

    return in_transaction(settings.DATABASE, answer)
