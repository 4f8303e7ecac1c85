"""Runs in the console: the list, the page with its journal, and the buttons."""

from __future__ import annotations

from agentruns.admin.chain import RunChain
from agentruns.admin.effects import RunEffects
from agentruns.admin.files import RunFiles
from agentruns.admin.limits import RunLimits
from agentruns.admin.live import RunLive
from agentruns.admin.moment import RunMoments
from agentruns.admin.replays import RunReplays
from agentruns.admin.run_bulk import RunBulk


class RunAdmin(RunFiles, RunChain, RunReplays, RunMoments, RunEffects, RunLimits, RunLive, RunBulk):
    """One task given to one agent: where it stands, why, and what can be done."""
