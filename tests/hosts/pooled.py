"""A project that takes its connections to PostgreSQL from a pool."""

from tests.hosts.base import *  # noqa: F403
from tests.hosts.base import DATABASES

POOL = {"OPTIONS": {"pool": {"min_size": 1, "max_size": 4}}}
DATABASES = {alias: {**database, **POOL} for alias, database in DATABASES.items()}
