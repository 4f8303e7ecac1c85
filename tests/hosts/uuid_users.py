"""A project with users of its own, whose keys are UUIDs."""

from tests.hosts.base import *  # noqa: F403
from tests.hosts.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.hosts.accounts"]
AUTH_USER_MODEL = "accounts.Account"
