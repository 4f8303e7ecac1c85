"""A project that turned time zones off."""

from tests.hosts.base import *  # noqa: F403

USE_TZ = False
