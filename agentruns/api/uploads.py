"""The blocks of a request: pictures and documents in the JSON, or as files beside the JSON in multipart."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from ninja import NinjaAPI
from ninja.params import models as parameters

from agentruns import content
from agentruns.api.errors import Problem
from agentruns.exceptions import ContentError
from agentruns.providers.attachments import DEFAULT

PART = "body"  # the part with the JSON
TAKING = {"start_run", "send_message"}  # operations that accept uploads
MOST = DEFAULT.request  # bytes of a request with files


def is_upload(request: HttpRequest) -> bool:
    """Check whether the body of a request is multipart."""
    return request.content_type == "multipart/form-data"


def require_small(request: HttpRequest) -> None:
    """Raise Problem if an upload is larger than the requests that a model's provider accepts."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if length.isascii() and length.isdecimal() and (len(length) > len(str(MOST)) or int(length) > MOST):
        detail = f"The request has more than {MOST} bytes."
        raise Problem.named("too-large", detail, max_bytes=MOST)


class UploadModel(parameters.BodyModel):
    """The body of a request: its JSON, or the JSON part of an upload."""

    @classmethod
    def get_request_data(cls, request: HttpRequest, api: NinjaAPI, path_params: Any) -> Any:
        """Parse the JSON after the authentication; Problem if the JSON's part is missing or too large."""
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


class Upload(parameters.Body):  # type: ignore[misc]
    """The parameter with which an operation gets the body that `UploadModel` reads."""

    _model = UploadModel

    @classmethod
    def _param_source(cls) -> str:
        return "body"


UPLOAD: Any = Upload(...)


def blocks_of(request: HttpRequest, given: Any) -> content.Input:
    """Build the input of a run from the JSON's text or blocks and the uploaded files; raises ContentError."""
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
        kind = content.FILES[block.type]
        blocks.append(kind(data=data, media_type=block.media_type, name=block.name))
    return [*blocks, *map(content.of_upload, files)]
