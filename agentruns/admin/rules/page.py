"""The page of a standing rule, the form of a new one, and a card's part about rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.text import capfirst
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin import html
from agentruns.admin.approvals.decide import why_no_password
from agentruns.admin.base import ReadOnlyAdmin, is_uuid, status_of
from agentruns.admin.forms import MomentField
from agentruns.agents.agent import registered
from agentruns.conf import settings
from agentruns.engine.gate import why_never
from agentruns.exceptions import AgentRunsError, NotFoundError, PermissionDeniedError, RuleStateError
from agentruns.journal import masking, policy, rules as written
from agentruns.models import Approval, ApprovalRule, RuleDecision
from agentruns.models.rule import BY_RULE
from agentruns.services import backtest, permissions, rules
from agentruns.tools import Tool
from agentruns.utils.redaction import redacted

SHOWN = 20  # decisions, changes and versions
STATUS = ApprovalRule.Status
# The status after each button, its service, and the permissions of which one is needed
VERBS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "stop": (STATUS.STOPPED, rules.stop_rule, ("write_rule", "activate_rule")),
    "try": (STATUS.DRY_RUN, rules.try_rule, ("write_rule",)),
    "activate": (STATUS.ACTIVE, rules.activate_rule, ("activate_rule",)),
    "retire": (STATUS.RETIRED, rules.retire_rule, ("write_rule",)),
}
FIELDS = ("name", "effect", "reason", "expires_at", "untrusted", "scope")
# How many rows the form has at least, with an empty one; the texts of a row, and its choices
ROWS = {"conditions": (5, ["path", "value"], ["op"]), "caps": (2, ["most", "number", "per"], ["of", "unit"])}
NUMBERS = {"integer", "number"}
EVERY_TYPE = {*NUMBERS, "string", "boolean", "null"}
UNITS = {86400: gettext_lazy("days"), 3600: gettext_lazy("hours"), 1: gettext_lazy("seconds")}
EXPIRY = MomentField(required=False, error_messages={"invalid": gettext_lazy("It expires at no time.")})


def page(admin: ReadOnlyAdmin, request: HttpRequest, obj: ApprovalRule, **context: Any) -> HttpResponse:
    """Render the page of one rule; `tried` is the result of a backtest."""
    versions = rules.list_rules(request.user).filter(name=obj.name, scope=obj.scope)
    decisions = list(obj.decisions.order_by("-decided_at", "-pk")[:SHOWN])
    may, results = partial(permissions.may, request.user, obj=obj), dict[str, Any](context)
    results["dry"] = backtest.agreement(obj, request.user)
    told = {name: results[name].disagreements for name in ("dry", "tried") if name in results}
    keys = [pk for each in told.values() for pk, _did in each]
    approvals = policy.visible_approvals(request.user).select_related("run__session")
    approvals = approvals.filter(pk__in=[*keys, *(each.approval_id for each in decisions)])
    cards = {
        each.pk: (html.visible(each.title, html.LINE), admin.other_page(request, Approval, each.pk))
        for each in masking.masked_approvals(approvals)
    }
    about: dict[str, Any] = {
        "rule": obj,
        "sentence": written.sentence(obj, html.plain),
        "buttons": [
            verb
            for verb, (status, _service, actions) in VERBS.items()
            if obj.status in rules.BEFORE[status] and any(map(may, actions))
        ],
        "may_write": may("write_rule"),
        "wants_password": permissions.needs_password(request, rules.risk_of(obj)),
        "replaced": versions.filter(status=STATUS.ACTIVE).exclude(pk=obj.pk).first(),
        "versions": versions[:SHOWN],
        "caps": [*_caps(obj)],
        "differs": {name: [(cards.get(pk), did) for pk, did in each] for name, each in told.items()},
        "decisions": [(each, cards.get(each.approval_id)) for each in decisions],
        "changes": obj.changes.all()[:SHOWN],
        "list_url": admin.url(request, "changelist"),
    }
    return admin.render(request, obj, title=_("Rule %s") % html.plain(obj), **about, **results)


def press_view(admin: ReadOnlyAdmin, request: HttpRequest, rule: ApprovalRule, verb: str) -> HttpResponse:
    """Press a button; except for Stop, refuse if the rule has changed since the page was shown."""
    if verb != "stop" and request.POST.get("seen") != str(rule.changes.values_list("pk", flat=True).first()):
        raise RuleStateError(_("The rule has changed since you looked. This is how it is now."))
    if verb == "activate" and (refusal := why_no_password(request, rules.risk_of(rule))):
        raise PermissionDeniedError(refusal)
    why = [request.POST.get("why", "").strip()] if verb in ("stop", "retire") else []
    rule = VERBS[verb][1](rule.pk, request.user, *why)
    text = _("Its status is now: %(status)s.") % {"status": rule.get_status_display()}
    return admin.done(request, rule, text, text)


def backtest_view(admin: ReadOnlyAdmin, request: HttpRequest, rule: ApprovalRule) -> HttpResponse:
    """Try the rule on the cards that people have decided, and show the result on its page."""
    return admin.page(request, rule, tried=backtest.backtest(rule, request.user))


def _caps(rule: ApprovalRule) -> Iterator[tuple[str, str, int | None]]:
    """Describe each cap and what is used of it; in percent, too, if the cap is one for all calls."""
    for place, cap in enumerate(written.caps_of(rule)):
        used, most = RuleDecision.used(settings.DATABASE, rule, place), Decimal(cap.most)
        text = _("%(used)s used, in all") if cap.per else _("%(used)s of %(most)s used")
        facts = {"used": number_format(f"{used.normalize():f}"), "most": number_format(cap.most)}
        percent = int(min(Decimal(100), 100 * used / most)) if most else 100
        yield capfirst(written.limit(cap, html.plain)), text % facts, None if cap.per else percent


# On the card of an approval


def of_card(admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval) -> dict[str, Any]:
    """Build a card's template context about rules: who decided, what dry runs say, and a suggestion."""
    decisions = RuleDecision.objects.using(settings.DATABASE).filter(call_id=approval.call_id)
    decisions = decisions.filter(approval_id=approval.pk)
    said = list(decisions.select_related("rule").order_by("rule__name", "rule__version"))
    seen = {*rules.list_rules(request.user).filter(decisions__in=said)} if said else ()
    page, name = partial(admin.other_page, request, ApprovalRule), approval.decided_by_name
    lines = [(each, page(each.rule_id) if each.rule in seen else "") for each in said]
    by_rule = [(each, url) for each, url in lines if name == f"{BY_RULE}{each.rule}" and not each.is_dry]
    return {
        "ruled_by": by_rule,
        "rule_urls": {str(each.rule_id): url for each, url in lines},
        "dry_runs": [line for line in lines if line[0].is_dry and line[0].rule.status == STATUS.DRY_RUN],
        "suggestion": None if name or said else backtest.suggest(approval, request.user),
    }


def draft_view(admin: ReadOnlyAdmin, request: HttpRequest, approval: Approval) -> HttpResponse:
    """Write the rule that a card suggests as a draft, once, and redirect to its page."""
    if (found := backtest.suggest(approval, request.user)) is None:
        raise RuleStateError(_("The decisions about calls like this one suggest no rule any more."))
    name, tool, (agent, scope) = found.name, approval.tool_name, (approval.run.agent, approval.run.scope)
    rule = rules.list_rules(request.user).filter(name=name, scope=scope).first()
    try:
        about: Any = {"name": name, "scope": scope, "conditions": found.conditions}
        rule = rule or rules.draft_rule(request.user, agent=agent, tool=tool, **about)
    except ValueError as error:
        raise RuleStateError(str(error)) from error
    admin.message_user(request, _("The draft is written. It decides nothing."), messages.SUCCESS)
    return HttpResponseRedirect(admin.other_page(request, ApprovalRule, rule.pk))


# The form


def form_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the tools, or the form of a rule for one tool; a POST writes a draft. Raises PermissionDenied.

    The parameter `rule` names the version that fills the form.
    """
    if not admin.has_add_permission(request):
        raise PermissionDenied
    key, agent, name = (request.GET.get(each, "") for each in ("rule", "agent", "tool"))
    old = admin.get_queryset(request).filter(pk=key).first() if is_uuid(key) else None
    agent, name = (old.agent, old.tool) if old else (agent, name)
    title = _("New version of rule %s") % html.plain(old) if old else _("New rule")
    page: dict[str, Any] = {"title": title, "list_url": admin.url(request, "changelist"), "refusal": ""}
    try:
        tool = rules.tool_of(agent, name)
    except NotFoundError as error:
        page |= {"refusal": html.plain(error) if name else "", "tools": _tools()}
        return admin.render(request, None, template="rule_tools", **page)
    given: dict[str, Any] = filled(old, tool) if old else {"scope": policy.ask("scope", "", request.user)}
    if request.method == "POST":
        try:
            rule = draft(request.user, agent, tool, given := sent(request.POST))
            return admin.done(request, rule, _("Written."), _("The draft is written. It decides nothing."))
        except (AgentRunsError, ValueError, ValidationError) as error:
            why = " ".join(getattr(error, "messages", [str(error)]))
            page["refusal"] = _("Nothing was written. %(why)s") % {"why": html.plain(why)}
            page["status"] = status_of(error) if isinstance(error, AgentRunsError) else 400
    for kind, (count, *_names) in ROWS.items():
        given[kind] = [*given.get(kind, []), *[{}] * max(count - len(given.get(kind, [])), 1)]
    paths = {written.short(path): (path, types) for path, types in paths_of(tool)}
    page |= {"given": given, "agent": agent, "tool": name, "units": UNITS, "paths": paths}
    page["sums"] = {path: short for short, (path, types) in paths.items() if types & NUMBERS}
    page["ops"] = [(op, (words % {"path": "", "value": ""}).strip()) for op, words in written.WORDS.items()]
    page["effects"] = ApprovalRule.Effect.choices
    return admin.render(request, None, template="rule_form", **page)


def draft(user: Any, agent: str, tool: Tool, given: dict[str, Any]) -> ApprovalRule:
    """Write what the form says as a draft; note in a row of the form why it is wrong.

    Raises ValueError, ValidationError and the errors of `draft_rule`.
    """
    caps, conditions = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in given["conditions"]:
        path, op, text = long(row["path"]), row["op"], row["value"]
        parts = text.split("\n" if "\n" in text else ",") if op == "in" else [text]
        values = [typed(each.strip(), types_of(tool, path, op), op) for each in parts if each.strip()]
        conditions.append({"path": path, "op": op, "value": values if op == "in" else [*values, None][0]})
        row["why"] = html.plain(written.wrong_condition(conditions[-1], tool.input_schema, tool.sensitive))
    for row in given["caps"]:
        digits = [row[each] if row[each].isdecimal() else "0" for each in ("number", "unit")]
        seconds = int(digits[0][:9]) * int(digits[1][:9])
        per = [long(each) for each in row["per"].split(",") if each.strip()]
        caps.append({"of": row["of"], "most": row["most"], "seconds": seconds, "per": per})
        row["why"] = html.plain(written.wrong_cap(caps[-1], tool.input_schema, tool.sensitive))
    if any(row["why"] for kind in ROWS for row in given[kind]):
        raise ValueError(_("Correct the rows below."))
    about = {**given, "untrusted": bool(given["untrusted"]), "expires_at": EXPIRY.clean(given["expires_at"])}
    about |= {"agent": agent, "tool": tool.name, "conditions": conditions, "caps": caps}
    return rules.draft_rule(user, **about)


def sent(post: QueryDict) -> dict[str, Any]:
    """Read the form as it was sent, without its empty rows."""
    texts = {name: [each.replace("\r\n", "\n") for each in values] for name, values in post.lists()}
    given: dict[str, Any] = {name: texts.get(name, [""])[-1].strip() for name in FIELDS}
    for kind, (_count, typed_in, chosen) in ROWS.items():
        names = typed_in + chosen
        columns = [texts.get(name, []) for name in names]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=False)]
        given[kind] = [row for row in rows if any(row[name].strip() for name in typed_in)]
    return given


def filled(rule: ApprovalRule, tool: Tool) -> dict[str, Any]:
    """Write a version of a rule as the texts of the form, without those that are redacted."""
    given: dict[str, Any] = {name: getattr(rule, name) for name in FIELDS}
    given |= {"reason": rule.reason if html.bare(rule.reason) == rule.reason else "", "conditions": []}
    given["expires_at"] = f"{timezone.localtime(rule.expires_at):%Y-%m-%dT%H:%M}" if rule.expires_at else ""
    for path, op, value in ((each["path"], each["op"], each["value"]) for each in rule.conditions):
        text = text_of(value, types_of(tool, path, op), op)
        given["conditions"].append({"path": written.short(path), "op": op, "value": text})
    given["caps"] = [{**cap, "per": ", ".join(map(written.short, cap["per"]))} for cap in rule.caps]
    for cap in given["caps"]:
        cap["unit"] = next(unit for unit in UNITS if cap["seconds"] % unit == 0)
        cap["number"] = cap["seconds"] // cap["unit"]
    return given


def text_of(value: Any, types: set[str], op: str) -> str:
    """Write a value so that the form reads the same value again; "" if it is redacted."""
    if redacted(value) != value:
        return ""
    if isinstance(value, list):
        return "".join(f"{text_of(each, types, op)}\n" for each in value)
    is_same = isinstance(value, str) and typed(value, types, op) == value == html.bare(value).strip()
    return value if is_same and value and "\n" not in value else json.dumps(value)


def typed(text: str, types: set[str], op: str) -> Any:
    """Read a value as JSON if one of the types allows it, else as a text; a text may stand in quotes."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        is_exact = not isinstance(value, float) or op in ("==", "in")  # limits stay as digits
        if isinstance(value, str) or (is_exact and written.type_of(value) & types):
            return value
    return text


def paths_of(tool: Tool) -> Iterator[tuple[str, set[str]]]:
    """Yield the paths of a tool's parameters that a rule may look at, each with its types."""
    for name in tool.input_schema.get("properties", {}):
        types = written.types_at(tool.input_schema, name.split(".")) & EVERY_TYPE
        if types and name not in tool.sensitive:
            yield f"arguments.{name}", types


def types_of(tool: Tool, path: str, op: str) -> set[str]:
    """List the types that a value may have which an operator compares with the value at a path."""
    place, *names = path.split(".")
    if place == "requester" or op in ("prefix", "regex"):
        return {"string"}
    return written.types_at(tool.input_schema, names) if place == "arguments" else EVERY_TYPE


def long(text: str) -> str:
    """Complete a path that `short` has shortened."""
    path = text.strip()
    return path if path.partition(".")[0] in ("arguments", "context", "requester") else f"arguments.{path}"


def _tools() -> list[tuple[str, str, str]]:
    """List agents and tools that may ask people, with the reason why no rule may answer the last ones."""
    asking = {
        (agent.name, tool.name): why_never(tool)
        for agent in reversed(registered())  # the newest version of an agent counts
        for tool in agent.tools.values()
        if tool.requires_approval or tool.outward
    }
    return [(*names, why) for names, why in sorted(asking.items(), key=lambda one: (one[1] != "", one))]
