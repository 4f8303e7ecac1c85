"""The budgets of a run: how much is used, what they leave for the next reply, and the costs of a day."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from django.utils import timezone

from agentruns.agents import prices
from agentruns.engine import in_doubt, tool_calls
from agentruns.engine.driver import Driver
from agentruns.journal import events, policy
from agentruns.journal.batch import Batch
from agentruns.journal.connection import own_alias
from agentruns.journal.deciders import restore
from agentruns.journal.fold import TOKENS, RunState
from agentruns.models import Run, Spending
from agentruns.models.run import TURN
from agentruns.providers.base import LIMITS, Model, ModelRequest, token_count
from agentruns.providers.names import model_identity, reply_limit
from agentruns.providers.window import most_tokens
from agentruns.utils.db import in_transaction

EXHAUSTED = "budget_exhausted"  # beginning of the reason of a pause
LOW = Decimal("0.8")  # of a budget, from which on a notice says so
FLOOR = 1024  # tokens of a reply; with fewer the run is paused instead
KNOWN = 4096  # tokens that every model may write; a higher limit could be more than a model accepts
LONGEST = 128_000  # tokens of a reply whose model has no limit that is known here
WAIT = 2.0  # seconds that a run waits for the requests of other runs
OF_A_RUN = ("max_steps", "token_budget", "cost_budget", "deadline")
UNITS = {"max_steps": " replies", "token_budget": " tokens", "deadline": " s"}
DONE = "So far: replies {steps}, tokens {tokens}, cost {cost}, calls that may have had an effect {calls}."
NO_POLICY = "policy: AGENTRUNS_POLICY failed in budget(); the log says how."
NO_PRICE = "no_price: AGENTRUNS_PRICES has no price for {model}, so the policy's budget cannot be kept."


class Budget(NamedTuple):
    """A budget of a run, by its name in the agent; times are in seconds."""

    name: str
    used: Decimal
    limit: Decimal

    def __str__(self) -> str:
        form = ".0f" if self.name == "deadline" else "f"
        return f"{self.name}: {self.used:{form}} of {self.limit:{form}}{UNITS.get(self.name, '')} used."


def limits_of(definition: dict[str, Any], run: RunState) -> dict[str, Any]:
    """Find the limits of a run: those of its definition, or those to which they were raised."""
    return {name: run.limits.get(name, definition.get(name)) for name in OF_A_RUN}


def budgets_of(definition: dict[str, Any], run: RunState, now: Callable[[], datetime]) -> Iterator[Budget]:
    """Yield the budgets that a run has; `now` is called only for a deadline."""
    for name, limit in limits_of(definition, run).items():
        if limit is None:
            continue
        if name == "max_steps":
            used = Decimal(run.step)
        elif name == "deadline":
            used = Decimal(str(run.elapsed(now()).total_seconds()))
        else:
            used = run.used(name)
        yield Budget(name, used, Decimal(limit) if type(limit) is int else Decimal(str(limit)))


def exceeded(definition: dict[str, Any], run: RunState, now: Callable[[], datetime]) -> Budget | None:
    """Find a budget that the run has used up."""
    return next((each for each in budgets_of(definition, run, now) if each.used >= each.limit), None)


def is_used_up(driver: Driver) -> bool:
    """Pause the run if a budget is used up, or fail it; return whether a budget is used up."""
    if (over := exceeded(driver.agent.definition(), driver.run, driver.now)) is not None:
        stop(driver, over.name, str(over))
    return over is not None


def stop(driver: Driver, name: str, text: str) -> None:
    """Pause the run because the budget `name` is used up; fail the run if its agent says so.

    A stateless run fails, too. Does nothing if a budget was raised just now.
    """
    seen = driver.run.limits

    def build(batch: Batch) -> None:
        run = batch.state.run
        if run.limits != seen or run.cancel_requested:  # the next step looks again
            return
        if driver.agent.on_budget == "fail" or not driver.store.durable:
            in_doubt.close_failed(batch, "BudgetExceededError", text)
            return
        cost = run.usage.get("cost", "0")
        done = DONE.format(steps=run.step, tokens=run.tokens, cost=cost, calls=len(run.acted))
        batch.add(events.RUN_PAUSED, events.RunPaused(reason=f"{EXHAUSTED}: {text} {done}", budget=name))

    driver.commit(build)


def warn(driver: Driver, batch: Batch) -> None:
    """Add a row for each budget that is nearly used up; once for each limit."""
    run = batch.state.run
    for name, used, limit in budgets_of(driver.agent.definition(), run, lambda: batch.at):
        if LOW * limit <= used < limit and name not in run.low:
            batch.add(events.BUDGET_LOW, events.BudgetLow(budget=name, used=f"{used:f}", limit=f"{limit:f}"))


def prepared(driver: Driver, request: ModelRequest, model: Model | str) -> ModelRequest | None:
    """Fit a request into the budgets of its run, and reserve its cost; None if the run may not send it now.

    Then the run is paused or has ended, or its lease is given back because requests of other runs have
    reserved what the day allows.
    """
    driver.charged = []
    limits = limits_of(driver.agent.definition(), driver.run)
    is_of_a_day = type(policy.current()).budget is not policy.Policy.budget
    if limits["token_budget"] is None and limits["cost_budget"] is None and not is_of_a_day:
        return request
    own = reply_limit(model, request.params)
    fitting = _lowered(driver, request, model, own)
    return fitting if fitting is not None and _reserve(driver, fitting, model, own) else None


def _lowered(
    driver: Driver, request: ModelRequest, model: Model | str, own: int | None
) -> ModelRequest | None:
    """Lower the `max_tokens` of a request to what the budgets leave; stop the run if that is below FLOOR.

    The conversation is assumed to take as many tokens, and to cost as much, as it did with the last reply.
    Before the first reply its size is estimated. `own` is the limit of a reply without budgets. A run that
    fails when a budget is used up sends the request unchanged.
    """
    run, definition = driver.run, driver.agent.definition()
    limits, last, price = limits_of(definition, run), run.last_usage, prices.price_of(model_identity(model))
    is_old_way = driver.agent.on_budget == "fail" or not driver.store.durable
    if is_old_way or (limits["token_budget"] is None and limits["cost_budget"] is None):
        return request
    if not (tokens := sum(token_count(last, kind) for kind in TOKENS)):
        tokens = most_tokens(_body(request)) // 2  # four bytes a token
        last = {"input_tokens": tokens}
    left: dict[str, int] = {}
    if limits["token_budget"] is not None:
        left["token_budget"] = limits["token_budget"] - int(run.used("token_budget")) - tokens
    if limits["cost_budget"] is not None and price and price["output"]:
        read = prices.cost_of({**last, "output_tokens": 0}, model_identity(model)) or 0
        rest = Decimal(limits["cost_budget"]) - run.used("cost_budget") - read
        left["cost_budget"] = int(rest * prices.MILLION / price["output"])
    name = min(left, key=left.__getitem__, default="")
    floor = min(FLOOR, own or FLOOR) + token_count(request.params.get("thinking"), "budget_tokens")
    if name and left[name] < floor:
        (budget,) = (each for each in budgets_of(definition, run, driver.now) if each.name == name)
        stop(driver, name, f"{budget} What the next request sends, and a reply of {floor} tokens, need more.")
        return None
    if name and left[name] < (own or KNOWN):
        params = {key: each for key, each in request.params.items() if key not in LIMITS}
        return replace(request, params={**params, "max_tokens": left[name]})
    return request


def _reserve(driver: Driver, request: ModelRequest, model: Model | str, own: int | None) -> bool:
    """Reserve the most that a request may cost, if the policy limits the cost of a day.

    If a limit is reached, stops the run or gives the lease back, and returns False.
    """
    if driver.lease is None or type(policy.current()).budget is policy.Policy.budget:
        return True
    rows = Run.objects.using(driver.alias).select_related("session")
    run = restore(rows.get(pk=driver.run.run_id), driver.run)
    limits, price = policy.costs_of_day(run), prices.price_of(model_identity(model))
    driver.mend()
    owners = {"session": run.session_id, "user": run.owner_id, "scope": run.scope}
    limits_by_key = {f"{name}:{owners[name]}": each for name, each in (limits or {}).items()}
    limits_by_key.pop("user:None", None)  # the program's run
    if limits is None or (limits_by_key and price is None):
        why = NO_POLICY if limits is None else NO_PRICE.format(model=model_identity(model))
        driver.commit(lambda batch: tool_calls.pause(batch, why))
        return False
    if price is None or not limits_by_key:
        return True
    tokens = token_count(request.params, "max_tokens") or own or LONGEST
    read = most_tokens(_body(request)) * max(each for kind, each in price.items() if kind != "output")
    most = prices.stored((read + tokens * price["output"]) / prices.MILLION)
    alias, day = own_alias(driver.alias), timezone.localdate(driver.now(), timezone.get_default_timezone())
    reserve = partial(Spending.reserve, alias, run.pk, day, limits_by_key, most)
    driver.charged, full = in_transaction(alias, reserve)
    if full is None:
        return True
    name, limit = full.key.partition(":")[0], limits_by_key[full.key]
    if full.spent >= limit:
        stop(driver, name, f"{name}: {full.spent.normalize():f} of {limit:f} of {day:%Y-%m-%d} used.")
    else:
        why = f"{TURN}requests at work may use up the {name}'s budget of today."
        driver.lease.release(delay=WAIT, why=why)
        driver.released = True
    return False


def _body(request: ModelRequest) -> dict[str, Any]:
    """Collect the parts of a request that the model reads."""
    return {"messages": request.messages, "system": request.system, "tools": request.tools}
