"""A project on PostgreSQL whose transactions are SERIALIZABLE."""

from tests.hosts.base import *  # noqa: F403
from tests.hosts.base import DATABASES

DATABASES = {
    alias: {**database, "OPTIONS": {"isolation_level": 4}}  # psycopg.IsolationLevel.SERIALIZABLE
    for alias, database in DATABASES.items()
}
