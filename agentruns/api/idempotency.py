"""Idempotency keys: a request with a known key is not done again, and gets the first answer again."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Status
from ninja.params.models import Header
from pydantic import BaseModel

from agentruns.api.auth import user_of
from agentruns.api.errors import URN, Problem
from agentruns.api.schemas import Keyed
from agentruns.conf import settings
from agentruns.models import IdempotencyRecord
from agentruns.utils import json as canonical
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import redact

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

KEY: Any = Header(None, alias=HEADER, description="as the member `idempotency_key`; give one, or both alike")


def key_of(header: str | None, body: Keyed | None) -> str | None:
    """Return the key of a request, if it has one. Raises Problem (422) if header and body differ."""
    member = body.idempotency_key if body else None
    if header is not None and member is not None and header != member:
        detail = f"The header {HEADER} and the member idempotency_key differ. Give one of them."
        where = [{"loc": ["header", HEADER], "msg": detail, "type": "mismatch"}]
        raise Problem(422, URN + "validation", "The request is not valid", detail, errors=where)
    return header if header is not None else member


def once(
    request: HttpRequest,
    response: HttpResponse,
    header: str | None,
    body: Keyed | None,
    act: Callable[[], BaseModel],
) -> Any:
    """Return the answer of `act`, or its earlier answer to the same request under the same key.

    `act` and the record of its answer are one transaction: there is a record exactly if it was done, and
    concurrent requests wait for it. An error leaves no record. Raises Problem (409) for a key of another
    request.
    """
    key = key_of(header, body)
    if key is None:
        return act()
    given = body.model_dump(exclude={"idempotency_key"}) if body else {}
    fingerprint = canonical.digest([request.method, request.path, given])
    owner = user_of(request).pk
    return in_transaction(settings.DATABASE, lambda: _once(owner, key, fingerprint, response, act))


def _once(
    owner: Any, key: str, fingerprint: str, response: HttpResponse, act: Callable[[], BaseModel]
) -> Any:
    records = IdempotencyRecord.objects.using(settings.DATABASE)
    # DO NOTHING waits for a concurrent request with this key, and leaves the caller's transaction usable.
    mine = IdempotencyRecord(owner_id=owner, key=key, fingerprint=fingerprint)
    records.bulk_create([mine], ignore_conflicts=True)
    record = records.get(owner_id=owner, key=key)
    if record.fingerprint != fingerprint:
        raise _of_another_request(record)
    if record.status:  # without one, this transaction made the record
        response[REPLAYED] = "true"
        return Status(record.status, json.loads(record.body))
    answer = act()
    unanswered = records.filter(pk=record.pk, status=0)
    if unanswered.update(status=HTTPStatus.OK, body=answer.model_dump_json()) != 1:
        raise AssertionError(f"The record of idempotency key {key!r} was answered or removed meanwhile.")
    return answer


def _of_another_request(record: IdempotencyRecord) -> Problem:
    return Problem(
        409,
        URN + "idempotency-key",
        "The idempotency key belongs to another request",
        f"Idempotency key {redact(record.key)!r} was given with another method, path or body. "
        "Use a new key for a new request, or repeat the first one unchanged.",
        answered_at=record.created_at,
    )
