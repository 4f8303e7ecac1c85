"""How much of each of its budgets a run has used. Pure: values in, figures out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from agentruns.engine.budgets import TOKENS

FULL = 100  # percent
_STOPPED = "BudgetExceededError: "  # how the error of a run that a budget ended begins


@dataclass(frozen=True, slots=True)
class Meter:
    """One budget: its name as the agent declares it, and how much of it is used."""

    name: str
    label: str
    figures: str
    percent: int
    is_used_up: bool


def meters(
    definition: dict[str, Any], step: int, usage: dict[str, Any], elapsed: timedelta | None
) -> list[Meter]:
    """Return a meter for each budget of a definition, in the order in which they are looked at.

    The definition that the run goes by says them, also where no agent of that name is registered. `elapsed`
    leaves out the time spent waiting for people; it is only looked at where there is a deadline.
    """
    found = []
    if limit := definition.get("max_steps"):
        found.append(_meter("max_steps", _("Model replies"), step, limit, _count))
    if limit := definition.get("token_budget"):
        tokens = sum(usage.get(kind, 0) for kind in TOKENS)
        found.append(_meter("token_budget", _("Tokens"), tokens, limit, _count))
    if limit := definition.get("cost_budget"):
        spent = Decimal(usage.get("cost", "0"))
        found.append(_meter("cost_budget", _("Cost"), spent, Decimal(limit), "{:f}".format))
    if (limit := definition.get("deadline")) and elapsed is not None:
        label = _("Time, without waiting for people")
        found.append(_meter("deadline", label, elapsed, timedelta(seconds=limit), _span))
    return found


def unlimited(definition: dict[str, Any]) -> str:
    """Return in one sentence what a definition sets no budget for, or ""."""
    labels = {"token_budget": _("tokens"), "cost_budget": _("cost"), "deadline": _("time")}
    names = [label for name, label in labels.items() if not definition.get(name)]
    return _("No limit is set for: %(names)s.") % {"names": ", ".join(names)} if names else ""


def judgement(found: list[Meter], *, ended: bool, error: str = "") -> str:
    """Return which budget ended a run, or is the one that will, or ""."""
    if ended:
        stopped = [each.label for each in found if error.startswith(f"{_STOPPED}{each.name}:")]
        return _("It was stopped by this limit: %(label)s.") % {"label": stopped[0]} if stopped else ""
    used_up = [each.label for each in found if each.is_used_up]
    if used_up:
        text = _("Used up: %(label)s. The run fails before its next request to the model.")
        return text % {"label": used_up[0]}
    nearest = max(found, key=lambda each: each.percent, default=None)
    if nearest is None or nearest.percent == 0:
        return ""
    text = _("If it goes on like this, it is stopped by: %(label)s (%(percent)d %% used).")
    return text % {"label": nearest.label, "percent": nearest.percent}


def _meter(name: str, label: str, used: Any, limit: Any, words: Any) -> Meter:
    percent = max(0, min(FULL, int(used * FULL // limit)))
    figures = _("%(used)s of %(limit)s") % {"used": words(used), "limit": words(limit)}
    return Meter(name, label, figures, percent, used >= limit)


def _count(amount: int) -> str:
    return number_format(amount, use_l10n=True, force_grouping=True)


def _span(time: timedelta) -> str:
    minutes, seconds = divmod(max(0, int(time.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, _("d")), (hours, _("h")), (minutes, _("min")), (seconds, _("s"))]
    told = [f"{amount}\xa0{unit}" for amount, unit in parts if amount]
    return " ".join(told[:2]) or f"0\xa0{_('s')}"
