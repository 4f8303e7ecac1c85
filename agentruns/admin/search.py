"""Finding runs by what an operator has in hand: an id or its beginning, a session key, a requester."""

from __future__ import annotations

import re
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


def is_uuid(text: str) -> bool:
    """Whether a text is an id of ours."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
