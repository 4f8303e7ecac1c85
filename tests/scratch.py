"""Where the tests' databases are: in memory where there is room.

Only processes die in these tests, never the machine, and what a process has written outlives it there too: a
disk would add nothing but the time of its fsync.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH = 4 * 1024**3  # bytes


def folder() -> str:
    """Choose the folder to make them in."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
        return str(MEMORY)
    return tempfile.gettempdir()
