"""The limits of a run and how much of each is used; the run's definition, and Adopt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin
from agentruns.admin.forms import AdoptForm, RaiseForm
from agentruns.admin.html import as_text, duration
from agentruns.admin.runs import actions
from agentruns.agents.agent import Agent, definition_difference, get_agent
from agentruns.conf import settings
from agentruns.exceptions import RunStateError, UnknownAgentError
from agentruns.journal import events, fold, read
from agentruns.models import Run
from agentruns.services.runs import control, waiting
from agentruns.utils import clock, redaction

FULL = 100  # percent
CUT = 400  # characters of a part of a definition
ANOTHER = gettext_lazy("The definition changed again since you looked. This is how it is now.")
LOGGED = gettext_lazy("Adopted another definition from the console.")
LEAD = 60  # characters that are shown before the first difference
_STOPPED = "BudgetExceededError: "  # how the error of a run that a budget ended begins


@dataclass(frozen=True, slots=True)
class Meter:
    """One budget, by its name in the agent, and how much of it is used."""

    name: str
    label: str
    figures: str
    percent: int
    is_used_up: bool


@dataclass(frozen=True, slots=True)
class Drift:
    """The agent of this process compared with the definition that a run follows."""

    agent: Agent | None  # None if this process knows no agent of that name
    is_served: bool  # the run's own definition is registered, so that it can continue
    parts: list[tuple[str, list[dict[str, str]]]]  # names in which they differ, each with both values

    @property
    def is_other(self) -> bool:
        """Check whether this process knows the run's agent, but not with the run's definition."""
        return self.agent is not None and not self.is_served


def situation(request: HttpRequest, run: Run) -> actions.Situation:
    """Find a run's state and definition; if the run goes on, compare the definition with today's agent."""
    definition = read.definition_body(settings.DATABASE, run.definition_id)
    now = None if run.is_ended else drift(run, definition)
    return replace(actions.situation(request, run), definition=definition, drift=now)


def limits(admin: ReadOnlyAdmin, request: HttpRequest, situation: actions.Situation) -> dict[str, Any]:
    """Build the context of a run's budgets; if the run goes on, also of Raise and Adopt."""
    run, definition, now = situation.run, situation.definition, situation.drift
    elapsed, (own, spent) = None, waiting.own_limits(settings.DATABASE, run)
    definition = {**definition, **own}
    if definition.get("deadline"):  # only the whole journal tells the time that counts
        rows = read.run_rows(settings.DATABASE, run.pk)
        closing = (row for row in rows if row.kind in events.CLOSING and events.COPIED not in row.payload)
        ends = [row.created_at for row in closing]
        elapsed = fold.fold(run.pk, rows).elapsed(ends[-1] if ends else clock.now(settings.DATABASE))
    budgets = meters(definition, run.step, run.usage, elapsed, spent)
    others = {"token_budget": _("tokens"), "cost_budget": _("cost"), "deadline": _("time")}
    names = ", ".join(label for name, label in others.items() if not definition.get(name))
    context: dict[str, Any] = {
        "meters": budgets,
        "unlimited": _("No limit is set for: %(names)s.") % {"names": names} if names else "",
        "origins": [*filter(None, (tool.get("origin") for tool in definition["tools"].values()))],
        "unjournaled": bool(definition.get("unjournaled_tools")),
        "judgement": judgement(budgets, ended=run.is_ended, error=run.error),
    }
    if not run.is_ended:
        text, minutes = _("%(label)s, new limit (now %(figures)s)"), _("%(label)s, new limit in minutes")
        facts = {each.name: {"label": each.label, "figures": each.figures} for each in budgets}
        labels = {name: (minutes if name == "deadline" else text) % each for name, each in facts.items()}
        context |= {
            "raising": actions.action(situation, "raise_budget", actions.over(situation)),
            "raise_form": RaiseForm(labels=labels, auto_id="raise_%s"),
            "is_exhausted": actions.is_exhausted(run),
        }
    if now is not None:
        seen = {"hash": now.agent.definition_hash if now.agent else "", "seq": str(actions.last_seq(run))}
        context |= {"drift": now, "adopt": adopt(situation)}
        context["adopt_form"] = AdoptForm(initial=seen, auto_id="adopt_%s")
    return context


def raise_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Raise the budgets of a run to the limits that were sent."""

    def do(run: Run) -> str:
        form = RaiseForm(request.POST, labels={})
        if not form.is_valid():
            raise RunStateError(" ".join(str(each) for errors in form.errors.values() for each in errors))
        now = actions.situation(request, run)
        actions.require(actions.action(now, "raise_budget", actions.over(now)))
        if control.raise_budget(run.pk, request.user, **form.limits()).status == Run.Status.PAUSED:
            return _("The budget is raised. The run stays paused.")
        return _("The budget is raised.")

    return actions.press(admin, request, run, do, str(_("Budget raised from the console.")))


def adopt_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Adopt the definition that the page showed; refuse if the registered definition or the run changed."""

    def do(run: Run) -> str:
        form = AdoptForm(request.POST)
        sent = form.cleaned_data if form.is_valid() else {}
        seen = situation(request, run)
        actions.require(adopt(seen))
        now: Drift = seen.drift  # the run has not ended: else Adopt is refused
        if now.agent is None or sent.get("hash") != now.agent.definition_hash:
            raise RunStateError(str(ANOTHER))
        actions.require_last_row(run, sent.get("seq"))
        run = control.adopt_definition(run.pk, request.user, reason=sent["reason"])
        if run.definition_id != sent["hash"]:  # registered meanwhile: the error undoes it
            raise RunStateError(str(ANOTHER))
        return _("Adopted. The run now follows the definition of version %s.") % run.version

    return actions.press(admin, request, run, do, str(LOGGED))


def adopt(situation: actions.Situation) -> actions.Action:
    """Find the reason why Adopt is not possible.

    Adopt lets the run use the definition that is registered now, instead of its own.
    """
    drift = situation.drift
    return actions.action(
        situation,
        "adopt",
        actions.over(situation),
        drift
        and drift.agent is None
        and _("This web server does not know the agent: there is nothing to adopt."),
        drift and drift.is_served and _("Its own definition is registered: there is nothing to adopt."),
        situation.is_live and _("A worker that has the old definition is working on it. Pause it first."),
    )


def adopt_selected(admin: ReadOnlyAdmin, request: HttpRequest, name: str, runs: list[Run]) -> HttpResponse:
    """Let several runs adopt after a page that asks for confirmation; refuse what was registered since."""
    verb = actions.Verb(
        AdoptForm,
        adopt,
        LOGGED,
        _("Let these runs adopt the present definition?"),
        look=situation,
        mark=lambda now: f":{getattr(now.drift and now.drift.agent, 'definition_hash', '')}",
    )
    together = sorted(runs, key=lambda run: (run.agent, run.definition_id, run.status))
    return actions.act_on_selected(admin, request, name, together, verb)


def meters(
    definition: dict[str, Any],
    step: int,
    usage: dict[str, Any],
    elapsed: timedelta | None,
    spent: Mapping[str, Decimal] = {},
) -> list[Meter]:
    """Build a meter for each budget of a definition, in the order in which they are checked.

    `elapsed` leaves out the time spent waiting for people; it matters only if there is a deadline. `spent` is
    what child runs have used of each budget.
    """
    budgets, count = list[Meter](), partial(number_format, force_grouping=True)

    def add(name: str, label: str, used: Any, limit: Any, words: Any) -> None:
        figures = _("%(used)s of %(limit)s") % {"used": words(used), "limit": words(limit)}
        percent = max(0, min(FULL, int(used * FULL // limit)))
        budgets.append(Meter(name, label, figures, percent, used >= limit))

    tokens = sum(usage.get(kind, 0) for kind in fold.TOKENS) + int(spent.get("token_budget", 0))
    cost = Decimal(usage.get("cost", "0")) + spent.get("cost_budget", 0)
    if limit := definition.get("max_steps"):
        add("max_steps", _("Model replies"), step, limit, count)
    if limit := definition.get("token_budget"):
        add("token_budget", _("Tokens"), tokens, limit, count)
    if limit := definition.get("cost_budget"):
        add("cost_budget", _("Cost"), cost, Decimal(limit), "{:f}".format)
    if (limit := definition.get("deadline")) and elapsed is not None:
        label, whole = _("Time, without waiting for people"), timedelta(seconds=int(elapsed.total_seconds()))
        add("deadline", label, whole, timedelta(seconds=limit), duration)
    return budgets


def judgement(budgets: list[Meter], *, ended: bool, error: str = "") -> str:
    """Name the budget that ended a run or, if the run goes on, that is used up or closest to its limit.

    Returns "" if no budget ended the run, or if a run that goes on has used none so far.
    """
    if ended:
        stopped = [each.label for each in budgets if error.startswith(f"{_STOPPED}{each.name}:")]
        return _("It was stopped by this limit: %(label)s.") % {"label": stopped[0]} if stopped else ""
    if used_up := [each.label for each in budgets if each.is_used_up]:
        return _("Used up: %(label)s. No further request is made to the model.") % {"label": used_up[0]}
    nearest = max(budgets, key=lambda each: each.percent, default=None)
    if nearest is None or nearest.percent == 0:
        return ""
    text = _("Closest limit: %(label)s, %(percent)d %% used.")
    return text % {"label": nearest.label, "percent": nearest.percent}


def drift(run: Run, definition: dict[str, Any]) -> Drift:
    """Compare a run's definition with the agent that Adopt would take in this process.

    This is the agent in the run's version. It is the newest version if the run's version is not registered,
    or has the run's definition already.
    """
    own: Agent | None = None
    newest: Agent | None = None
    with suppress(UnknownAgentError):
        newest = get_agent(run.agent)
        own = get_agent(run.agent, run.version)
    is_served = own is not None and own.definition_hash == run.definition_id
    agent = newest if is_served else own or newest  # what adopting would take
    if agent is None or agent.definition_hash == run.definition_id:
        return Drift(agent, is_served, [])
    now, parts = agent.definition(), []
    for name in definition_difference(definition, now):
        texts = list[str]()
        for body in (definition, now):
            value = body.get(name)
            if name.startswith("tools."):  # such as "tools.refund.timeout"
                tool, _dot, key = name.removeprefix("tools.").partition(" (")[0].partition(".")
                value = body.get("tools", {}).get(tool)
                value = value.get(key) if key and value is not None else value
            texts.append(redaction.redact(_("not there") if value is None else as_text(value)))
        start, cells = 0, list[dict[str, str]]()
        if max(map(len, texts)) > CUT:  # begin shortly before the first difference
            pairs = enumerate(zip(*texts, strict=False))
            start = max(0, next((at for at, (a, b) in pairs if a != b), min(map(len, texts))) - LEAD)
        for text in texts:
            piece = text[start : start + CUT]  # only the piece around what differs is shown first
            shown = ("…" if start else "") + piece + ("…" if start + CUT < len(text) else "")
            cells.append({"text": shown, "whole": text if piece != text else ""})
        parts.append((name, cells))
    return Drift(agent, is_served, parts)
