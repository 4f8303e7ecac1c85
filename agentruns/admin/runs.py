"""Runs in the console: the list, the page with its journal, and the buttons."""

from __future__ import annotations

from agentruns.admin.listing import RunListing
from agentruns.admin.overview import RunOverview


class RunAdmin(RunOverview, RunListing):
    """One task given to one agent: where it stands, why, and what can be done."""
