"""System checks, each with the fix as its hint; an Error only if the package's promise does not hold.

Importing this package registers the checks. Only `check --database ALIAS` and `migrate` query a database.
"""

from agentruns.checks import agents, deployment, settings

__all__ = ["agents", "deployment", "settings"]
