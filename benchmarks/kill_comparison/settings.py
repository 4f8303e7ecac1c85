"""As benchmarks.settings, but a dead worker's lease is over at once."""

from benchmarks.kill_comparison.world import LEASE_SECONDS
from benchmarks.settings import *  # noqa: F403

AGENTRUNS_LEASE_SECONDS = LEASE_SECONDS
AGENTRUNS_HEARTBEAT_SECONDS = LEASE_SECONDS / 4
