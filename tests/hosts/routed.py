"""A project that keeps agentruns by our router, and by its own what its tools write, in another database."""

from tests.hosts.base import *  # noqa: F403

AGENTRUNS_DATABASE = "other"
DATABASE_ROUTERS = ["agentruns.models.router.JournalRouter", "tests.hosts.router.Router"]
