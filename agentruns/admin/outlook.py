"""What each button leads to, with the exact text the model will get. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.text import visible
from agentruns.engine.gate import DENIED
from agentruns.engine.in_doubt import EXPIRED
from agentruns.journal.conversation import EDITED
from agentruns.models import Approval


@dataclass(frozen=True, slots=True)
class Outlook:
    """A sentence, and the text the model gets where it is known beforehand."""

    text: str
    told: SafeString | str = ""


def outlooks(approval: Approval) -> dict[str, Outlook]:
    """Return what follows from each verb, and from nobody deciding in time."""
    missing = approval.required - approval.approved_count
    runs = _("A worker runs the call, once, with the arguments above. The model gets what the tool returns.")
    if missing > 1:
        runs = _("%(missing)d people have to approve; yours is one of them. Nothing runs before.") % {
            "missing": missing
        }
    voids = ""
    if approval.approved_count:
        voids = _("Approvals given to what it says now are void: those people have to look again.")
    edited = _("The call runs with the arguments below. The model is told them before the result:")
    if approval.required > 1:
        edited = _(
            "It takes %(count)d people, of whom you are the first, to approve the arguments below:"
        ) % {"count": approval.required}
    return {
        "approve": Outlook(runs),
        "edit": Outlook(f"{edited} {voids}".strip(), visible(EDITED.format(arguments=_("(the arguments)")))),
        "answer": Outlook(_("The call is not run. The model gets your text as its result, word for word.")),
        "deny": Outlook(
            _("The call is not run, and the same call is refused for the rest of this run. The model gets:"),
            visible(DENIED.format(reason=_("(your reason)"))),
        ),
        "expire": Outlook(
            _("If nobody decides in time the call is not run. The model gets:"), visible(EXPIRED)
        ),
    }


def of_a_question(approval: Approval) -> dict[str, Outlook]:
    """Return the same for a question, which nothing executes."""
    found: dict[str, Any] = outlooks(approval)
    return {**found, "answer": Outlook(_("The model gets your text, word for word, and goes on."))}
