"""Typed view of the AGENTRUNS_* settings; read at each use, so `override_settings` just works."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.utils.module_loading import import_string

DEFAULTS: dict[str, Any] = {
    "DATABASE": "default",
    "DISPATCHER": "agentruns.engine.wakeup.SweepDispatcher",
    "LEASE_SECONDS": 60,
    "HEARTBEAT_SECONDS": 20,
    "MAX_ATTEMPTS": 5,
    "BACKOFF_SECONDS": (1, 300),
    "PAYLOAD_INLINE_MAX": 65_536,
    "PAYLOAD_STORAGE": "agentruns",
    "APPROVAL_EXPIRES": None,
    "REQUESTER_MAY_APPROVE": True,
    "CAN_DECIDE": None,
    "DEFAULT_MODEL": None,
    "PRICES": {},
    "REDACT": None,
    "TELEMETRY": None,
    "ADMIN": True,
    "NOTIFIERS": [],
    "BASE_URL": "",
    "NOTIFY_EMAILS": [],
    "WEBHOOK_URL": "",
    "WEBHOOK_SECRET": "",
    "API_PING_SECONDS": 15,
    "API_THROTTLE": None,
    "REFUSALS": [],
}

THROTTLED = ("user", "anonymous")
_RATE = re.compile(r"[1-9][0-9]{0,8}/[smhd]")


class Settings:
    """AGENTRUNS_* with defaults; a property where a setting is parsed or imported first."""

    DATABASE: str
    DISPATCHER: str
    LEASE_SECONDS: float
    HEARTBEAT_SECONDS: float
    MAX_ATTEMPTS: int
    BACKOFF_SECONDS: tuple[float, float]
    PAYLOAD_INLINE_MAX: int
    API_PING_SECONDS: float
    PAYLOAD_STORAGE: str
    APPROVAL_EXPIRES: timedelta | None
    REQUESTER_MAY_APPROVE: bool
    DEFAULT_MODEL: Any  # a Claude model's name, or an object with propose()
    PRICES: dict[str, dict[str, Any]]
    REDACT: str | None
    TELEMETRY: str | None
    ADMIN: bool
    NOTIFIERS: list[str]
    BASE_URL: str
    NOTIFY_EMAILS: list[str]
    WEBHOOK_URL: str
    WEBHOOK_SECRET: str

    def __init__(self) -> None:
        self._holder: object = None  # the holder of Django's settings; `override_settings` replaces it
        self._unset: set[str] = set()  # names that the project does not set

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(f"There is no setting AGENTRUNS_{name}.")
        # Django raises an error for each read of an unset name, which took a tenth of a step's CPU time.
        holder, full = object.__getattribute__(django_settings, "_wrapped"), f"AGENTRUNS_{name}"
        if holder is not self._holder:
            self._unset = set()
            self._holder = holder
        if name in self._unset and full not in vars(holder):
            return DEFAULTS[name]
        try:
            return getattr(django_settings, full)
        except AttributeError:
            self._unset.add(name)
            return DEFAULTS[name]

    @property
    def can_decide(self) -> Callable[..., bool] | None:
        """Return the project's own rule for who may decide an approval, or None."""
        path = self.__getattr__("CAN_DECIDE")
        return import_string(path) if path else None

    @property
    def refusals(self) -> tuple[Any, ...]:
        """Return the exceptions, and functions of one, that mean "nothing happened" for every tool.

        Raises ValueError for anything but a list of dotted paths, ImportError.
        """
        paths = self.__getattr__("REFUSALS")
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"{paths!r} is not a list of dotted paths")
        return tuple(import_string(path) for path in paths)

    @property
    def redact(self) -> Callable[[str], str] | None:
        """Return the project's function that redacts shown, exported and logged texts, or None."""
        path = self.__getattr__("REDACT")
        return import_string(path) if path else None

    @property
    def api_throttle(self) -> dict[str, str]:
        """Return the rate of each kind of caller of the API, such as "100/m"; without one there is no limit.

        Raises ValueError for a setting of another form.
        """
        rates = self.__getattr__("API_THROTTLE")
        if rates is None:
            return {}
        if not isinstance(rates, dict):
            raise ValueError(f"{rates!r} is not a dict")
        if unknown := [name for name in rates if name not in THROTTLED]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(THROTTLED)}")
        limited = {name: rate for name, rate in rates.items() if rate is not None}
        for rate in limited.values():
            if not isinstance(rate, str) or not _RATE.fullmatch(rate):
                raise ValueError(f"{rate!r} is not a number of requests and a time, as in '100/m'")
        return limited


settings = Settings()


def unknown_names() -> list[str]:
    """Return the AGENTRUNS_* names in the project's settings that do not exist."""
    return sorted(
        name
        for name in dir(django_settings)
        if name.startswith("AGENTRUNS_") and name.removeprefix("AGENTRUNS_") not in DEFAULTS
    )
