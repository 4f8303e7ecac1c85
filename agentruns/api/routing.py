"""The router of all operations, and what they share: uploads, idempotency keys, pages, headers, problems."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from uuid import UUID

from django.conf import settings as django_settings
from django.core import signing
from django.core.exceptions import RequestDataTooBig
from django.db import connections
from django.db.models import CharField, Model, Q, QuerySet, Value
from django.db.models.functions import Cast
from django.http import HttpRequest, RawPostDataException
from ninja import Header, NinjaAPI, Router, Status
from ninja.decorators import decorate_view
from ninja.params import models as parameters
from pydantic import BaseModel

from agentruns import content
from agentruns.api.auth import BearerAuth, OpenPath, SessionAuth, entry_for, entry_of, user_of
from agentruns.api.docs import illustrated
from agentruns.api.errors import MARK, Problem
from agentruns.api.schemas import Key, Keyed
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, ContentError
from agentruns.models import IdempotencyRecord, SessionBearer
from agentruns.providers.attachments import DEFAULT
from agentruns.utils import db, json as canonical, redaction

PAGE, SALT = 50, "agentruns.cursor"
KEY_HEADER = "Idempotency-Key"
PART = "body"  # the part of an upload with the JSON
UPLOADING = {"start_run", "send_message"}  # operations that accept uploads
MOST = DEFAULT.request  # bytes of a request with files
GivenKey = Annotated[
    Key | None,
    Header(alias=KEY_HEADER, description="as the member `idempotency_key`; give one, or both alike"),
]

M = TypeVar("M", bound=Model)
Act = Callable[[], BaseModel]


class RunsRouter(Router):
    """A router that adds documentation to its operations, and wraps each operation by `watched`."""

    def add_api_operation(self, path: str, methods: list[str], view_func: Any, **options: Any) -> None:
        """Add an operation; the function's name becomes its id and finds its examples."""
        self.path_operations.setdefault(path, OpenPath())
        name, is_open = view_func.__name__, options["auth"] is None
        options |= {"operation_id": name, "openapi_extra": illustrated(name, methods[0], is_open=is_open)}
        super().add_api_operation(path, methods, decorate_view(watched)(view_func), **options)


def watched(run: Any) -> Callable[..., Any]:
    """Wrap an operation's `run`: check the body's size before authentication, and add response headers."""
    operation = run.__self__

    @wraps(run)
    def watch(request: HttpRequest, **values: Any) -> Any:
        entry = entry_for(operation)
        setattr(request, MARK, entry)
        try:
            if is_upload(request) and operation.operation_id in UPLOADING:
                require_small(request)
            else:
                request.body  # noqa: B018 - reads it
        except (Problem, RawPostDataException) as error:
            response = operation.api.on_exception(request, error)
        except RequestDataTooBig:
            most = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            text = f"The body has more than {most} bytes. Send less, or ask the operator to raise the limit."
            response = operation.api.on_exception(request, Problem.named("too-large", text, max_bytes=most))
        except ValueError:
            text = "Content-Length is not a number of bytes. Send JSON in UTF-8."
            response = operation.api.on_exception(request, Problem.named("malformed", text))
        else:
            entry.before = {**request.__dict__, MARK: None}  # a cycle would keep the body in memory
            response = run(request, **values)
        for name, value in entry.headers.get(response.status_code, {}).items():
            response.setdefault(name, value)
        response.setdefault("Cache-Control", "private, no-store")
        return response

    return watch


def as_problem(view: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a view: turn errors of agentruns into Problem, an HttpError that any NinjaAPI can answer."""

    @wraps(view)
    def translated(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return view(request, *args, **kwargs)
        except AgentRunsError as error:
            raise Problem.of(error) from error

    return translated


# One flat router, because ninja would not pass a host's own `auth` on to nested routers.
router = RunsRouter(auth=[BearerAuth(), SessionAuth()], tags=["agent runs"])
router.add_decorator(as_problem)


def is_upload(request: HttpRequest) -> bool:
    """Check whether the body of a request is multipart."""
    return request.content_type == "multipart/form-data"


def require_small(request: HttpRequest) -> None:
    """Raise Problem (413) if an upload's Content-Length exceeds MOST, the limit of a model's provider."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if length.isascii() and length.isdecimal() and (len(length) > len(str(MOST)) or int(length) > MOST):
        raise Problem.named("too-large", f"The request has more than {MOST} bytes.", max_bytes=MOST)


class UploadModel(parameters.BodyModel):
    """The body of a request: its JSON, or the JSON part of an upload."""

    @classmethod
    def get_request_data(cls, request: HttpRequest, api: NinjaAPI, path_params: Any) -> Any:
        """Parse the JSON of the body, or of the upload's part PART. Ninja calls this after authentication.

        Raises Problem: 400 if this part is missing, 413 if the fields that are no files are too large.
        """
        if is_upload(request):
            try:
                text = request.POST.get(PART)
            except RequestDataTooBig:
                most = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
                detail = f"What is no file has more than {most} bytes."
                raise Problem.named("too-large", detail, max_bytes=most) from None
            if text is None:
                raise Problem.named("malformed", f"The part {PART!r} with the JSON is missing.")
            request._body = text.encode(errors="surrogatepass")
        return super().get_request_data(request, api, path_params)


class Body(parameters.Body):  # type: ignore[misc]
    """The parameter of an operation whose body is read by `UploadModel`; ninja uses the class's name."""

    _model = UploadModel


UPLOAD: Any = Body(...)


def blocks_of(request: HttpRequest, given: Any) -> content.Input:
    """Build a run's input from `given`, a text or the blocks of the JSON, and from the uploaded files.

    A text without files stays a text. Raises ContentError for a file that cannot be used.
    """
    uploads: Any = request.FILES.lists() if is_upload(request) else []
    files = [file for _, each in uploads for file in each]
    if isinstance(given, str) and not files:
        return given
    blocks: list[content.Block] = [content.Text(given)] if isinstance(given, str) else []
    for number, block in enumerate([] if isinstance(given, str) else given):
        if block.type == "text":
            blocks.append(content.Text(block.text))
            continue
        try:
            data = base64.b64decode(block.data, validate=True)
        except (binascii.Error, ValueError):
            raise ContentError(f"The data of block {number} is no base64.") from None
        blocks.append(content.FILES[block.type](data=data, media_type=block.media_type, name=block.name))
    return [*blocks, *map(content.of_upload, files)]


def key_of(header: str | None, body: Keyed | None) -> str | None:
    """Read a request's key from header or body; None without a key, Problem (422) if the two differ."""
    member = body.idempotency_key if body else None
    if header is not None and member is not None and header != member:
        detail = f"The header {KEY_HEADER} and the member idempotency_key differ. Give one of them."
        where = [{"loc": ["header", KEY_HEADER], "msg": detail, "type": "mismatch"}]
        raise Problem.named("validation", detail, errors=where)
    return header if header is not None else member


def once(request: HttpRequest, header: str | None, body: Keyed | None, act: Act, again: Act) -> Any:
    """Execute a request by `act`; answer a repeated request with the same key by `again`.

    Without a key, only calls `act`. No answer is stored: `again` checks anew what the caller may do and see.
    `act` and the record of the key are one transaction, so the record exists exactly if the request was
    executed, and concurrent requests with the key wait. An error leaves no record. Raises Problem: 409 for a
    key of another request, 422 for a visitor's key or if header and body have different keys.
    """
    if (key := key_of(header, body)) is None:
        return act()
    user = user_of(request)
    if isinstance(user, SessionBearer):
        detail = "A visitor's decision takes no idempotency key: a repeated one is 409, with who decided."
        raise Problem.named("validation", detail)
    given = body.given.items() if body else ()
    plain = {name: str(value) if isinstance(value, datetime) else value for name, value in given}
    fingerprint = canonical.digest([request.method, request.path, plain])
    records = IdempotencyRecord.objects.using(settings.DATABASE)

    def answer() -> Any:
        # DO NOTHING waits for a concurrent request with this key, and leaves the transaction usable.
        mine = IdempotencyRecord(owner_id=user.pk, key=key, fingerprint=fingerprint)
        records.bulk_create([mine], ignore_conflicts=True)
        record = records.get(owner_id=user.pk, key=key)
        if record.fingerprint != fingerprint:
            raise Problem.named(
                "idempotency-key",
                f"Idempotency key {redaction.redact(record.key)!r} was given with another method, path or "
                "body. Use a new key for a new request, or repeat the first one unchanged.",
                answered_at=record.created_at,
            )
        if record.status:  # without a status, this transaction made the record
            repeated = again()
            entry_of(request).headers[record.status] = {"Idempotency-Replayed": "true"}
            return Status(record.status, repeated)
        done: Any = act()
        run_id = getattr(done, "run", None) or done.id  # `done` names a run, or is a run
        if records.filter(pk=record.pk, status=0).update(status=HTTPStatus.OK, run_id=run_id) != 1:
            raise AssertionError(f"The record of idempotency key {key!r} was answered or removed meanwhile.")
        return done

    return db.in_transaction(settings.DATABASE, answer)


def page(rows: QuerySet[M], moment: str, cursor: str | None) -> tuple[list[M], str | None]:
    """Read the page of `rows` after `cursor`, newest first by the field `moment`.

    Returns the page and the next page's cursor, None after the last page. Problem (400) for a bad cursor.
    """
    # Compare the stored text on SQLite, which compares times as texts: '12:00:00.5' is not '12:00:00.500000'.
    as_text = connections[rows.db].vendor == "sqlite"
    if cursor is not None:
        try:
            at, pk = signing.loads(cursor, salt=SALT)
        except (signing.BadSignature, ValueError):
            detail = "Pass `next` of the page before, unchanged, as `cursor`."
            raise Problem.named("bad-cursor", detail) from None
        bound: Any = Value(at, output_field=CharField()) if as_text else datetime.fromisoformat(at)
        before = Q(**{f"{moment}__lt": bound}) | Q(pk__lt=UUID(pk))
        rows = rows.filter(before, **{f"{moment}__lte": bound})  # only the __lte can use an index
    rows = rows.order_by(f"-{moment}", "-pk")
    placed: Any = rows.annotate(position=Cast(moment, CharField())) if as_text else rows
    page_rows = list(placed[: PAGE + 1])
    if len(page_rows) <= PAGE:
        return page_rows, None
    last = page_rows[PAGE - 1]
    at = last.position if as_text else getattr(last, moment).isoformat()
    return page_rows[:PAGE], signing.dumps([at, str(last.pk)], salt=SALT)
