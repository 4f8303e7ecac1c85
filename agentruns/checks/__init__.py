"""System checks, whose hints say how to fix a problem. An Error means that a promise cannot be kept.

Importing this package registers the checks. Only `check --database ALIAS` and `migrate` query a database.
"""

from agentruns.checks import agents, deployment, settings

__all__ = ["agents", "deployment", "settings"]
