"""System checks: an Error only where the promise is false, each with the fix as its hint.

Importing this package registers them. Only `check --database ALIAS` and `migrate` query a database, quickly.
"""

from agentruns.checks import agents, database, deployment, settings

__all__ = ["agents", "database", "deployment", "settings"]
