"""The crash matrix: what becomes of a run at each point (down) under each fault (across)."""

from __future__ import annotations

from typing import NamedTuple

# What a cell says of the run whose process met the fault:
#
# here   that very process completed it, and no caller saw an error
# again  a caller saw an error of the database; the same call repeated completed it at once
# sweep  the process did not go on with it; a sweep completed it
# doubt  one call's outcome is known to nobody: held for a person, who had it completed
#
# A row is a crash point as AGENTRUNS_CRASH_AT takes it. The run calls post (declares nothing), charge
# (reconcile), lookup (safe to retry) and tally (transactional), in this order: a point without a number is
# met with post, and before_result_commit:4 is inside tally's transaction. What the agent is told is made by
# the process that starts the run, and by no other one. At the last two, a message is sent to a queued
# run. At server_after_tool the first call is one of an MCP server's tool. At those of waits the first call
# waits for an event, which comes after the fault and under the call's own key. The faults:
#
# sigkill           killed at the point
# terminate         the server ends the connection's backend; the process lives on
# committed         the next COMMIT goes through, the connection breaks before the answer
# rolled_back       the next COMMIT never arrives, and the connection breaks
# open_committed    the connection breaks, the transaction stays open with its locks; then it commits
# open_rolled_back  the same, then it is rolled back
# second            frozen until its lease is over; another process goes on; then it wakes
TABLE = """
point                   sigkill  terminate  committed  rolled_back  open_committed  open_rolled_back  second
before_start_commit     again    here       here       here         here            here              here
after_start             sweep    here       here       here         here            here              sweep
after_repair            sweep    here       here       here         here            here              sweep
before_model            sweep    here       here       here         here            here              sweep
after_model             sweep    here       here       here         here            here              sweep
after_reply             doubt    here       here       here         here            here              doubt
before_tool             doubt    here       here       here         here            here              doubt
after_tool              doubt    here       here       here         here            here              doubt
waits_after_tool        sweep    sweep      sweep      sweep        sweep           sweep             sweep
waits_before_commit     sweep    sweep      sweep      sweep        sweep           sweep             sweep
waits_after_result      sweep    sweep      sweep      sweep        sweep           sweep             sweep
server_after_tool       doubt    here       here       here         here            here              doubt
after_tool:2            sweep    here       here       here         here            here              sweep
after_tool:3            sweep    here       here       here         here            here              sweep
before_result_commit    doubt    here       here       here         here            here              doubt
before_result_commit:4  sweep    sweep      here       sweep        sweep           sweep             sweep
after_result            sweep    here       here       here         here            here              sweep
before_finish           sweep    here       here       here         here            here              sweep
after_finish            here     here       here       here         here            here              here
after_decision          sweep    here       here       here         here            here              sweep
send_before_commit      again    here       here       here         here            here              here
send_after_commit       here     here       here       here         here            here              here
"""
WAITS = {
    "waits_after_tool": "after_tool",
    "waits_before_commit": "before_result_commit",
    "waits_after_result": "after_result",
}
SERVED = {"server_after_tool": "after_tool"}
SENDING = {"send_before_commit": "before_start_commit", "send_after_commit": "after_start"}
# On PostgreSQL the start in a new session is one statement: before it nothing is locked.
INSIDE_TRANSACTION = {
    "sqlite": ("before_start_commit", "before_result_commit:4", "send_before_commit"),
    "postgresql": ("before_result_commit:4", "send_before_commit"),
}

ONE_WRITER = (
    "SQLite has one writer: while a process is frozen inside a transaction, no other one can write at all."
)
# Cells that cannot be, by database, point ("" is every point) and fault; and why.
IMPOSSIBLE = {
    ("sqlite", "", "terminate"): "SQLite runs in the process itself: there is no backend to terminate.",
    ("sqlite", "", "open_committed"): "SQLite has no server whose transaction outlives the client.",
    ("sqlite", "", "open_rolled_back"): "SQLite has no server whose transaction outlives the client.",
    **{("sqlite", point, "second"): ONE_WRITER for point in INSIDE_TRANSACTION["sqlite"]},
}


class Cell(NamedTuple):
    """One point under one fault, what is expected of it, and why it cannot be (or "")."""

    point: str
    fault: str
    expected: str
    impossible: str


def cells(vendor: str) -> list[Cell]:
    """List every cell of the table on a database."""
    (_, *faults), *rows = (line.split() for line in TABLE.strip().splitlines())
    found = []
    for point, *words in rows:
        for fault, word in zip(faults, words, strict=True):
            everywhere = IMPOSSIBLE.get((vendor, "", fault), "")
            found.append(Cell(point, fault, word, IMPOSSIBLE.get((vendor, point, fault), everywhere)))
    return found
