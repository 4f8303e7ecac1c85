"""Typed view of the AGENTRUNS_* settings; each is read once, and again after `override_settings`."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

DEFAULTS: dict[str, Any] = {
    "DATABASE": "default",
    "DISPATCHER": "agentruns.engine.wakeup.SweepDispatcher",
    "LEASE_SECONDS": 60,
    "HEARTBEAT_SECONDS": 20,
    "TOOL_TIMEOUT": 3600,
    "MAX_ATTEMPTS": 5,
    "BACKOFF_SECONDS": (1, 300),
    "PAYLOAD_INLINE_MAX": 65_536,
    "PAYLOAD_STORAGE": "agentruns",
    "PAYLOAD_TIMEOUT": 30,
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
    """AGENTRUNS_* with defaults; a cached property where a setting is parsed or imported first."""

    DATABASE: str
    DISPATCHER: str
    LEASE_SECONDS: float
    HEARTBEAT_SECONDS: float
    TOOL_TIMEOUT: float
    MAX_ATTEMPTS: int
    BACKOFF_SECONDS: tuple[float, float]
    PAYLOAD_INLINE_MAX: int
    API_PING_SECONDS: float
    PAYLOAD_STORAGE: str
    PAYLOAD_TIMEOUT: float
    APPROVAL_EXPIRES: timedelta | None
    REQUESTER_MAY_APPROVE: bool
    DEFAULT_MODEL: Any  # a Claude model's name, or an object with propose()
    PRICES: dict[str, dict[str, Any]]
    REDACT: str | None
    TELEMETRY: str | None
    ADMIN: bool
    NOTIFIERS: list[str]
    REFUSALS: list[str]
    BASE_URL: str
    NOTIFY_EMAILS: list[str]
    WEBHOOK_URL: str
    WEBHOOK_SECRET: str
    CAN_DECIDE: str | None
    API_THROTTLE: Any  # as the project wrote it

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(f"There is no setting AGENTRUNS_{name}.")
        # Kept as an attribute, so that this method is not called for it again.
        value = self.__dict__[name] = getattr(django_settings, f"AGENTRUNS_{name}", DEFAULTS[name])
        return value

    def forget(self, *, setting: str, **kwargs: Any) -> None:
        """Read everything anew: a setting of the project has changed, as in a test."""
        if setting.startswith("AGENTRUNS_"):
            self.__dict__.clear()

    @cached_property
    def can_decide(self) -> Callable[..., bool] | None:
        """Return the project's own rule for who may decide an approval, or None."""
        path = self.CAN_DECIDE
        return import_string(path) if path else None

    @cached_property
    def refusals(self) -> tuple[Any, ...]:
        """Return the exceptions, and functions of one, that mean "nothing happened" for every tool.

        Raises ValueError for anything but a list of dotted paths, ImportError.
        """
        paths = self.REFUSALS
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"{paths!r} is not a list of dotted paths")
        return tuple(import_string(path) for path in paths)

    @cached_property
    def redact(self) -> Callable[[str], str] | None:
        """Return the project's function that redacts shown, exported and logged texts, or None."""
        path = self.REDACT
        return import_string(path) if path else None

    @cached_property
    def api_throttle(self) -> dict[str, str]:
        """Return the rate of each kind of caller of the API, such as "100/m"; without one there is no limit.

        Raises ValueError for a setting of another form.
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
            if not isinstance(rate, str) or not _RATE.fullmatch(rate):
                raise ValueError(f"{rate!r} is not a number of requests and a time, as in '100/m'")
        return limited


settings = Settings()
setting_changed.connect(settings.forget)


def unknown_names() -> list[str]:
    """Return the AGENTRUNS_* names in the project's settings that do not exist."""
    return sorted(
        name
        for name in dir(django_settings)
        if name.startswith("AGENTRUNS_") and name.removeprefix("AGENTRUNS_") not in DEFAULTS
    )
