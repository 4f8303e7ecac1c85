"""What clients may keep: nothing, but for a run that they ask for again with its ETag."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.http import parse_etags

import agentruns
from agentruns.api.schemas import utc
from agentruns.models import Run
from agentruns.utils import json as canonical

REVALIDATED = "private, no-cache"


def uncached(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let no answer be kept anywhere that does not say itself what may be."""

    @wraps(run)
    def answering(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        response = run(request, *args, **kwargs)
        if isinstance(response, HttpResponseBase):
            response.setdefault("Cache-Control", "private, no-store")
        return response

    return answering


def tag_of(run: Run) -> str:
    """Return the ETag of a run, read together with its session: weak, for it is not made of the body."""
    # The lease, the back-off and the reason why nobody serves a run change without a row of the journal.
    moments = (run.lease_expires_at, run.not_before, run.updated_at)
    about = [
        agentruns.__version__,
        str(run.pk),
        run.session.next_seq - 1,
        run.status,
        run.lease_epoch,
        run.attempts,
        run.blocked_reason,
        *(moment and utc(moment) for moment in moments),
    ]
    return f'W/"{canonical.digest(about)[:32]}"'


def is_known(request: HttpRequest, tag: str) -> bool:
    """Whether the client has what `tag` stands for already."""
    known = parse_etags(request.headers.get("If-None-Match", ""))
    return "*" in known or tag.removeprefix("W/") in {each.removeprefix("W/") for each in known}
