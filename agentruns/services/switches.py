"""The kill switch: runs of a switched-off agent wait, and calls of a switched-off tool are refused."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.engine.leases import forget_switches
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.policy import Switch
from agentruns.models import Control
from agentruns.services import permissions
from agentruns.tools.card import one_line
from agentruns.utils.bounds import REASON_LENGTH
from agentruns.utils.db import delete_rows, in_transaction
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.switches")


def switched_off(actor: Any = None) -> dict[tuple[str, str], Control]:
    """Map (kind, name) of each agent and tool that is off, and that the actor may switch, to its switch."""
    switches = Control.objects.using(settings.DATABASE).switches()
    off = {(kind, name): control for control in switches for _, kind, name in [control.name.split(":", 2)]}
    is_program, may = events.is_program(actor), permissions.may
    return {key: each for key, each in off.items() if is_program or may(actor, "switch", Switch(*key))}


def switch(kind: str, name: str, state: str, actor: Any = None, *, reason: str = "") -> bool:
    """Switch an "agent" or a "tool" (`kind`) "off" or "on"; return False if it was in that state already.

    Every process obeys within seconds. Runs of the agent wait after their current step. Calls of the tool
    that have not started are refused with a text. Raises PermissionDeniedError, and ValueError for a bad
    kind, state or name, or for "off" without a reason or with a reason over REASON_LENGTH.
    """
    is_name = 0 < len(name) <= 100 and "\0" not in name
    if kind not in ("agent", "tool") or state not in ("off", "on") or not is_name:
        raise ValueError(_("There is no such agent or tool."))
    if not permissions.may(actor, "switch", Switch(kind, name)):
        raise PermissionDeniedError(permissions.why_not(actor, "switch"))
    if state == "off" and not 0 < len(reason.strip()) <= REASON_LENGTH:
        raise ValueError(_("Give a reason of at most %(count)d characters.") % {"count": REASON_LENGTH})
    key, person = f"off:{kind}:{name}", events.actor_ref(actor)
    who = person["name"] if person else ""
    controls = Control.objects.using(settings.DATABASE)

    def change() -> bool:
        if state == "on":
            return delete_rows(controls.filter(name=key)) == 1
        if controls.filter(name=key).exists():
            return False
        controls.bulk_create([Control(name=key, seen_at=Now(), reason=reason, actor=who)])
        return True

    changed = in_transaction(settings.DATABASE, change)
    forget_switches()
    if changed:
        logger.warning("Switched %s %s %s by %s", kind, one_line(name), state, one_line(who) or "the program")
    return changed
