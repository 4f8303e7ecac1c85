"""The kill switch: agents whose runs wait, and tools whose calls are refused, until they are switched on."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.engine.leases import forget_switches
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events
from agentruns.models import Control
from agentruns.services import permissions
from agentruns.utils.bounds import REASON_LENGTH
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.switches")

KINDS = ("agent", "tool")


def switched_off() -> QuerySet[Control]:
    """Return the switches of what is off now."""
    return Control.objects.using(settings.DATABASE).switches()


def switch_off(kind: str, name: str, actor: Any = None, *, reason: str) -> bool:
    """Switch an "agent" or a "tool" off, by its name; return False if it was off already.

    Every process knows it within seconds. Runs of an agent stop at their next boundary and wait; a call of a
    tool that is not at work is refused with a text. Raises ValueError, PermissionDeniedError.
    """
    key = _key(kind, name, actor)
    if not reason.strip() or len(reason) > REASON_LENGTH:
        raise ValueError(_("Give a reason of at most %(count)d characters.") % {"count": REASON_LENGTH})
    who = _name_of(actor)
    controls = Control.objects.using(settings.DATABASE)
    given = {"seen_at": Now(), "reason": reason, "actor": who}
    made = in_transaction(settings.DATABASE, lambda: controls.get_or_create(name=key, defaults=given))[1]
    return _done(key, who, "off", changed=made)


def switch_on(kind: str, name: str, actor: Any = None) -> bool:
    """Switch it on again; return False if it was on. Errors as `switch_off`."""
    key = _key(kind, name, actor)
    rows = Control.objects.using(settings.DATABASE).filter(name=key)
    deleted = in_transaction(settings.DATABASE, rows.delete)[0]
    return _done(key, _name_of(actor), "on", changed=deleted == 1)


def _key(kind: str, name: str, actor: Any) -> str:
    if kind not in KINDS or not name or len(name) > 100:
        raise ValueError(_("There is no such agent or tool."))
    if not permissions.may(actor, "switch"):
        raise PermissionDeniedError(permissions.why_not(actor, "switch"))
    return f"off:{kind}:{name}"


def _name_of(actor: Any) -> str:
    found = events.actor_ref(actor)
    return found["name"] if found else ""


def _done(key: str, who: str, state: str, *, changed: bool) -> bool:
    forget_switches()
    if changed:
        logger.warning("Switched %s %s by %s", state, key.removeprefix("off:"), who or "the program")
    return changed
