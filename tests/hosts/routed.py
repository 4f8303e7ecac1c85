"""A project whose router keeps agentruns, and what its tools write, in a database of their own."""

from tests.hosts.base import *  # noqa: F403

AGENTRUNS_DATABASE = "other"
DATABASE_ROUTERS = ["tests.hosts.router.Router"]
