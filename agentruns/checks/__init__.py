"""System checks: an Error only where the promise is false, each with the fix as its hint.

Checks that query a database are run by `check --database ALIAS` and by `migrate` only, as Django does it, and
are quick. Importing this package registers them.
"""

from agentruns.checks import agents, database, deployment, settings

__all__ = ["agents", "database", "deployment", "settings"]
