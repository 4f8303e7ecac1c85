"""Checks of the AGENTRUNS_* settings and of the Django settings on which durability depends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.utils.module_loading import import_string

from agentruns import journal
from agentruns.agents.agent import registered
from agentruns.agents.prices import mistakes
from agentruns.checks.base import check
from agentruns.conf import DEFAULTS, SECRET_PREFIX, settings
from agentruns.providers.names import PROVIDERS, make, names_of, options_of
from agentruns.tools.refusals import mistake
from agentruns.utils.bounds import LEAST_SENT
from agentruns.utils.calls import arity_mistake


@check()
def check_settings() -> Iterator[CheckMessage]:
    """Check the names of AGENTRUNS_* settings, and the prices, heartbeat, database and USE_TZ."""
    unknown = {*dir(django_settings)} - {f"AGENTRUNS_{name}" for name in DEFAULTS}
    for name in sorted(each for each in unknown if each.startswith("AGENTRUNS_")):
        hint = "A mistyped safety setting has no effect; see docs/reference/settings for the names."
        yield Warning(f"There is no setting {name}.", hint=hint, id="agentruns.W001")
    for why in mistakes(settings.PRICES):
        hint = "{'claude-sonnet-5-5': {'input': 3, 'output': 15}}, for a million tokens."
        yield Error(f"AGENTRUNS_PRICES cannot be used: {why}.", hint=hint, id="agentruns.E007")
    if settings.HEARTBEAT_SECONDS * 2 > settings.LEASE_SECONDS:
        text = "AGENTRUNS_HEARTBEAT_SECONDS leaves no room to miss one beat within AGENTRUNS_LEASE_SECONDS."
        yield Error(text, hint="Make the heartbeat at most half of the lease.", id="agentruns.E001")
    if not django_settings.USE_TZ:
        text = "USE_TZ is off, so leases and the journal's times are ambiguous when clocks change."
        yield Error(text, hint="Set USE_TZ = True; see Django's guide 'Time zones'.", id="agentruns.E002")
    if settings.DATABASE not in connections:
        text = f"AGENTRUNS_DATABASE names {settings.DATABASE!r}, which is not in DATABASES."
        yield Error(text, hint="Use one of DATABASES' aliases.", id="agentruns.E003")


def unusable(name: str, wrong: Callable[[], object], hint: str, id: str) -> Iterator[CheckMessage]:
    """Yield an Error for the setting `name` if `wrong()` raises an exception or returns a reason, a text."""
    try:
        why = reason if isinstance(reason := wrong(), str) else ""
    except Exception as error:  # a module may raise anything while it is imported
        why = str(error)
    if why:
        text = f"AGENTRUNS_{name} = {getattr(settings, name)!r} cannot be used: {why}."
        yield Error(text, hint=hint, id=id)


@check()
def check_event_secrets() -> Iterator[CheckMessage]:
    """Check AGENTRUNS_EVENT_SECRETS without printing a secret, and that signatures can be verified."""
    try:
        if settings.event_secrets and find_spec("standardwebhooks") is None:
            raise ValueError("needs `pip install agentruns[webhooks]`")
    except ValueError as error:
        hint = f"{{'payment': '{SECRET_PREFIX}' and base64}}, or {{'payment': {{'a scope': '…'}}}}."
        yield Error(f"AGENTRUNS_EVENT_SECRETS {error}.", hint=hint, id="agentruns.E027")


@check()
def check_models() -> Iterator[CheckMessage]:
    """Check that each entry of AGENTRUNS_MODELS makes a model, without printing its options or their keys."""
    hint = "AGENTRUNS_MODELS = {'local': {'provider': 'ollama', 'model': 'llama3.3'}}"
    for name in settings.MODELS:
        try:
            make(**options_of(name))
        except (TypeError, ValueError) as error:
            yield Error(f"AGENTRUNS_MODELS[{name!r}] is no model: {error}", hint=hint, id="agentruns.E022")


@check()
def check_notifiers() -> Iterator[CheckMessage]:
    """Check that the notifiers in AGENTRUNS_NOTIFIERS can be loaded, and run the `check` of each."""
    paths = settings.NOTIFIERS
    hint = "AGENTRUNS_NOTIFIERS = ['agentruns.contrib.mail.MailNotifier'], a list of dotted paths."
    if not isinstance(paths, list | tuple):
        yield Error("AGENTRUNS_NOTIFIERS is not a list.", hint=hint, id="agentruns.E009")
        return
    for path in paths:
        try:
            notifier = journal.outbox.load_notifier(path)
        except Exception as error:  # a module may raise anything while it is imported
            text = f"AGENTRUNS_NOTIFIERS names {path!r}, which cannot be used: {error}"
            yield Error(text, hint=hint, id="agentruns.E009")
        else:
            yield from getattr(notifier, "check", list)()


@check()
def check_policy() -> Iterator[CheckMessage]:
    """Check that AGENTRUNS_POLICY names a subclass of Policy, and that it adds no public methods."""
    if DEFAULTS["POLICY"] == settings.POLICY:
        return  # without an import of the default

    def wrong() -> str:
        made = settings.policy
        is_policy = isinstance(made, type) and issubclass(made, journal.policy.Policy)
        return "" if is_policy else "it is no subclass of Policy"

    hint = "AGENTRUNS_POLICY = 'shop.policy.Policy', a subclass of agentruns.Policy."
    errors = [*unusable("POLICY", wrong, hint, id="agentruns.E018")]
    yield from errors
    for name in sorted(set(dir(settings.policy)) - set(dir(journal.policy.Policy))) if not errors else ():
        if not name.startswith("_") and callable(getattr(settings.policy, name)):
            text = f"{settings.POLICY}.{name} is a rule that nobody asks"
            hint = "Correct the name; begin a helper's with an underscore."
            yield Warning(f"{text}: agentruns.Policy has no such method.", hint=hint, id="agentruns.W015")


@check()
def check_impersonation() -> Iterator[CheckMessage]:
    """Check that the policy knows who acts in others' names, if an app that lets people do so is there."""
    found = [name for name in ("loginas", "django_su") if apps.is_installed(name)]
    with suppress(Exception):  # `check_policy` tells of a policy that cannot be used
        if found and settings.policy.impersonator is journal.policy.Policy.impersonator:
            text = (
                f"With {found[0]!r} people act in others' names, and the journal would not name these people."
            )
            hint = "Override impersonator(request) in AGENTRUNS_POLICY; see docs/howto/hosts.md."
            yield Warning(text, hint=hint, id="agentruns.W023")


@check()
def check_values() -> Iterator[CheckMessage]:
    """Check ANCHOR, API_THROTTLE, CONNECTION_STATE, RATE, REFUSALS, TELEMETRY, SCANNER and limits of size."""

    def uncalled(name: str, *parameters: str) -> str:
        named = getattr(settings, name.lower())
        if named is not None and not callable(named):
            return "it cannot be called"
        return f"it {wrong}" if (wrong := arity_mistake(named, *parameters)) else ""

    def wrong_anchor() -> str:
        if settings.ANCHOR == "agentruns.contrib.anchor.append_to_file" and not settings.ANCHOR_FILE:
            return "AGENTRUNS_ANCHOR_FILE is not set"
        return uncalled("ANCHOR", "session_id", "seq", "head")

    def wrong_rate() -> str:
        models = [model for agent in registered() for model in agent.models] if settings.rates else []
        known = PROVIDERS.union(settings.MODELS, *map(names_of, models))
        return next(
            (f"no agent has a model or provider {name!r}" for name in settings.rates.keys() - known), ""
        )

    hint = "AGENTRUNS_ANCHOR = 'shop.audit.anchor', of a function of a session's id, a number and a hash."
    yield from unusable("ANCHOR", wrong_anchor, hint, id="agentruns.E019")
    hint = "AGENTRUNS_CONNECTION_STATE = 'shop.tenants.state', of a function of a connection."
    state = ("CONNECTION_STATE", "connection")
    yield from unusable("CONNECTION_STATE", lambda: uncalled(*state), hint, id="agentruns.E024")
    hint = "AGENTRUNS_API_THROTTLE = {'user': '100/m', 'anonymous': '10/m'}; per s, m, h or d."
    yield from unusable("API_THROTTLE", lambda: settings.api_throttle, hint, id="agentruns.E013")
    hint = "AGENTRUNS_RATE = {'anthropic': '50/m'}, by a provider or model of an agent; per s, m, h or d."
    yield from unusable("RATE", wrong_rate, hint, id="agentruns.E026")
    hint = "AGENTRUNS_REFUSALS = ['shop.payments.CardDeclined', 'agentruns.http_refusal'], dotted paths."
    yield from unusable(
        "REFUSALS", lambda: next(filter(None, map(mistake, settings.refusals)), ""), hint, id="agentruns.E017"
    )
    hint = "'agentruns.contrib.opentelemetry.OpenTelemetry', which needs `pip install agentruns[otel]`."
    path = settings.TELEMETRY
    yield from unusable("TELEMETRY", lambda: path and import_string(path), hint, id="agentruns.E016")
    hint = "AGENTRUNS_SCANNER = 'shop.scanning.scan', of a function of a name, a media type and bytes."
    scanner = ("SCANNER", "name", "media_type", "data")
    yield from unusable("SCANNER", lambda: uncalled(*scanner), hint, id="agentruns.E020")
    yield from no_number("FILE_MAX", 1, "5_000_000", "bytes", id="agentruns.E020")
    yield from no_number("PAYLOAD_INLINE_MAX", 0, "65_536", "bytes", id="agentruns.E012")
    if settings.RESULT_SENT_MAX is not None:
        what = f"characters from {LEAST_SENT} on"
        yield from no_number("RESULT_SENT_MAX", LEAST_SENT, "100_000, or None", what, id="agentruns.E012")


def no_number(name: str, least: int, usual: str, what: str, id: str) -> Iterator[CheckMessage]:
    """Yield an Error unless the setting `name` is an int of at least `least`; the hint suggests `usual`."""
    value = getattr(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        text = f"AGENTRUNS_{name} is {value!r}, not a number of {what}."
        yield Error(text, hint=f"AGENTRUNS_{name} = {usual}", id=id)


@check(deploy=True)
def check_payload_storage() -> Iterator[CheckMessage]:
    """Check, with --deploy only, that STORAGES has the storage that AGENTRUNS_PAYLOAD_STORAGE names."""
    name = settings.PAYLOAD_STORAGE
    if name and not journal.payloads.is_configured():
        yield Warning(
            f"STORAGES has no {name!r}, so tool results of any size are stored in the database.",
            hint=f"STORAGES = {{..., {name!r}: {{'BACKEND': 'django.core.files.storage.FileSystemStorage', "
            "'OPTIONS': {'location': '/a/private/folder'}}}; or, if they are to stay in the database, "
            "AGENTRUNS_PAYLOAD_STORAGE = ''.",
            id="agentruns.W005",
        )
