"""Finding runs by what an operator has in hand: the beginning of an id, a session key, a requester, a day."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from agentruns.admin.paginator import MOST
from agentruns.models import Run

_ID = re.compile(r"[0-9a-f]{4,32}")


def matching(term: str, run: str = "") -> Q:
    """Return what finds the runs that `term` may mean; `run` is the lookup prefix that leads to Run."""
    term = term.strip().replace("\x00", "")
    ids = _beginning(term)
    if ids is None:
        return _named(term, run)
    # An OR of two tables would read both: each says what it has, the newest of as many as are counted.
    first, second = (Run.objects.filter(pk__in=_newest(which)) for which in (ids, _named(term)))
    return Q(**{f"{run}pk__in": first.values("pk").union(second.values("pk"))})


def _newest(which: Q) -> QuerySet[Any]:
    return Run.objects.filter(which).order_by("-pk").values("pk")[: MOST + 1]


def _named(term: str, run: str = "") -> Q:
    """Return what finds runs by their session, whose requester is that of its runs."""
    key, requester = f"{run}session__key__istartswith", f"{run}session__owner_name__istartswith"
    return Q(**{key: term}) | Q(**{requester: term})


def _beginning(term: str) -> Q | None:
    """Return what finds ids by their beginning: a range, which an index serves; None if it is no id."""
    digits = term.lower().replace("-", "")
    if not _ID.fullmatch(digits):
        return None
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    return Q(pk__gte=first, pk__lte=last)


def first_id(moment: datetime) -> UUID:
    """Return the least id that can be made at a moment: ids begin with their time, and are indexed."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)


def is_uuid(text: str) -> bool:
    """Whether a text is an id of ours."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
