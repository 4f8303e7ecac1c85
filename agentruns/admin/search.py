"""Finding runs by what an operator has in hand: the beginning of an id, a session key, a requester, a day."""

from __future__ import annotations

import re
from datetime import datetime
from uuid import UUID

from django.db.models import Q

_ID = re.compile(r"[0-9a-f]{4,32}")


def matching(term: str, run: str = "") -> Q:
    """Return what finds the runs that `term` may mean; `run` is the lookup prefix that leads to Run."""
    term = term.strip().replace("\x00", "")
    found = Q(**{f"{run}session__key__istartswith": term}) | Q(**{f"{run}owner_name__istartswith": term})
    return found | beginning(term, f"{run}id")


def beginning(term: str, field: str) -> Q:
    """Return what finds ids by their beginning: a range, which an index serves; nothing if it is no id."""
    digits = term.strip().lower().replace("-", "")
    if not _ID.fullmatch(digits):
        return Q(pk__in=[])
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    return Q(**{f"{field}__gte": first, f"{field}__lte": last})


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
