"""The AGENTRUNS_* settings with their types; each is read once, and again after `override_settings`."""

from __future__ import annotations

import base64
import re
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string


class Defaults:
    """The types of the AGENTRUNS_* settings, and their values in a project that does not set them."""

    DATABASE: str = "default"
    CONNECTION_STATE: str | None = None
    CONNECTIONS: int = 8  # of the journal's own, per process
    DISPATCHER: str = "agentruns.engine.wakeup.SweepDispatcher"
    LEASE_SECONDS: float = 60
    HEARTBEAT_SECONDS: float = 20
    TOOL_TIMEOUT: float = 3600
    MAX_ATTEMPTS: int = 5
    BACKOFF_SECONDS: tuple[float, float] = (1, 300)
    PAYLOAD_INLINE_MAX: int = 65_536
    PAYLOAD_STORAGE: str = "agentruns"
    PAYLOAD_TIMEOUT: float = 30
    FILE_MAX: int = 20 * 2**20
    RESULT_SENT_MAX: int | None = 100_000  # in any script far fewer tokens than the smallest of windows
    SCANNER: str | None = None
    APPROVAL_EXPIRES: timedelta | None = None
    REQUESTER_MAY_APPROVE: bool = True
    DEFAULT_MODEL: Any = None  # a model's name, or an object with propose()
    MODELS: dict[str, dict[str, Any]] = {}  # models by names of the project's own
    PRICES: dict[str, dict[str, Any]] = {}
    CURRENCY: str = ""
    RATE: dict[str, str] = {}  # requests in a time, by name of a provider or model
    REDACT: str | None = None
    TELEMETRY: str | None = None
    ADMIN: bool = True
    NOTIFIERS: list[str] = []
    BASE_URL: str = ""
    NOTIFY_EMAILS: list[str] = []
    MAIL_LINK_SECONDS: int | None = None  # in which a mail's link decides; None: mails have none
    SLACK_TOKEN: str = ""
    SLACK_CHANNEL: str = ""
    SLACK_SIGNING_SECRET: str = ""
    SLACK_USER: str | None = None
    WEBHOOK_URL: str = ""
    WEBHOOK_SECRET: str = ""
    EVENT_SECRETS: dict[str, Any] = {}  # that sign events, by name of an event
    API_PING_SECONDS: float = 15
    API_STREAMS: int = 500
    API_THROTTLE: Any = None  # as the project wrote it
    REFUSALS: list[str] = []
    POLICY: str = "agentruns.journal.policy.Policy"
    REAUTH_SECONDS: float | None = None
    ANCHOR: str | None = None
    ANCHOR_FILE: str = ""
    TOKEN_DAYS: int = 90
    TOKEN_MAX_DAYS: int = 366
    SESSION_TOKEN_SECONDS: int = 86_400
    EVENT_DAYS: float = 7  # for which an event is kept that nobody waits for


DEFAULTS: dict[str, Any] = {name: value for name, value in vars(Defaults).items() if name.isupper()}
if TYPE_CHECKING:
    Typed = Defaults
else:  # without class attributes, which would hide the project's settings from `__getattr__`
    Typed = object

THROTTLED = ("user", "anonymous")
_RATE = re.compile(r"[1-9][0-9]{0,8}/[smhd]")
SECRET_PREFIX, SHORTEST_SECRET = "whsec_", 24  # bytes: the specification asks for at least 192 bits
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _named(name: str) -> cached_property[Any]:
    """Build a property that imports the object at the setting's dotted path; None if the setting is empty."""
    return cached_property(lambda own: import_string(path) if (path := getattr(own, name)) else None)


def _parsed(rate: object) -> tuple[int, int]:
    """Parse a rate such as "100/m" into (number, seconds); raises ValueError."""
    if not isinstance(rate, str) or not _RATE.fullmatch(rate):
        raise ValueError(f"{rate!r} is not a number of requests and a time, as in '100/m'")
    number, _, unit = rate.partition("/")
    return int(number), _SECONDS[unit]


def signing_keys(secret: Any) -> list[bytes]:
    """Decode the keys in a secret of Standard Webhooks, one or more with spaces between them.

    Raises ValueError, with a text that quotes no key.
    """
    parts = str(secret or "").split()
    if not parts:
        raise ValueError("is not set")
    try:
        if not all(part.startswith(SECRET_PREFIX) for part in parts):
            raise ValueError
        keys = [base64.b64decode(part.removeprefix(SECRET_PREFIX), validate=True) for part in parts]
    except ValueError:
        raise ValueError(f"must be '{SECRET_PREFIX}' followed by base64") from None
    if any(len(key) < SHORTEST_SECRET for key in keys):
        raise ValueError(f"is shorter than {SHORTEST_SECRET} bytes")
    return keys


class Settings(Typed):
    """The AGENTRUNS_* settings or their defaults, as attributes without the prefix, such as `DATABASE`.

    Attributes in lower case are parsed or imported from a setting.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(f"There is no setting AGENTRUNS_{name}.")
        # Stored as an attribute, so that the next access does not call this method.
        value = self.__dict__[name] = getattr(django_settings, f"AGENTRUNS_{name}", DEFAULTS[name])
        return value

    def forget(self, *, setting: str, **kwargs: Any) -> None:
        """Discard all values read so far, because an AGENTRUNS_* setting was changed, as a test does."""
        if setting.startswith("AGENTRUNS_"):
            self.__dict__.clear()

    policy = _named("POLICY")  # a class
    connection_state = _named("CONNECTION_STATE")  # a function that reads what is set on a connection
    anchor = _named("ANCHOR")  # a function that receives the heads of ended runs
    scanner = _named("SCANNER")  # a function that checks files, and raises to refuse one
    slack_user = _named("SLACK_USER")  # a function that finds the user of a Slack user
    redact = _named("REDACT")  # a function that redacts shown, exported and logged texts

    @cached_property
    def refusals(self) -> tuple[Any, ...]:
        """The exceptions and functions that AGENTRUNS_REFUSALS names; raises ValueError or ImportError."""
        paths = self.REFUSALS
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"{paths!r} is not a list of dotted paths")
        return tuple(import_string(path) for path in paths)

    @cached_property
    def api_throttle(self) -> dict[str, str]:
        """The limits by kind of caller, such as {"user": "100/m"}, without a kind whose limit is None.

        Empty if API_THROTTLE is not set. Raises ValueError for a wrong setting.
        """
        rates = self.API_THROTTLE
        if rates is None:
            return {}
        if not isinstance(rates, dict):
            raise ValueError(f"{rates!r} is not a dict")
        if unknown := [name for name in rates if name not in THROTTLED]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(THROTTLED)}")
        limited = {name: rate for name, rate in rates.items() if rate is not None}
        for rate in limited.values():
            _parsed(rate)
        return limited

    @cached_property
    def event_secrets(self) -> dict[tuple[str, str], list[bytes]]:
        """The keys of EVENT_SECRETS by name of an event ("*": any) and scope of its runs.

        Raises ValueError for a wrong setting, with a text that quotes no key.
        """
        if not isinstance(self.EVENT_SECRETS, dict):
            raise ValueError("is no dict of secrets by name of an event")
        keys = {}
        for name, given in self.EVENT_SECRETS.items():
            for scope, secret in (given if isinstance(given, dict) else {"": given}).items():
                try:
                    keys[name, scope] = signing_keys(secret)
                except ValueError as error:
                    raise ValueError(f"has a secret for {name!r} in scope {scope!r} that {error}") from None
        return keys

    @cached_property
    def rates(self) -> dict[str, tuple[float, int]]:
        """The seconds between two requests and the requests at once, by name in RATE; raises ValueError.

        A tenth of a rate's requests may be made at once, and at least one.
        """
        if not isinstance(self.RATE, dict):
            raise ValueError(f"{self.RATE!r} is not a dict")
        parsed = {name: _parsed(rate) for name, rate in self.RATE.items()}
        return {name: (seconds / number, max(1, number // 10)) for name, (number, seconds) in parsed.items()}


settings = Settings()
setting_changed.connect(settings.forget)
