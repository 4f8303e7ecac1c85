"""An agent whose refunds are deferred, for a process that is to be killed, and for the one that goes on."""

from __future__ import annotations

from tests.db.deferrals import desk

agent = desk(name="deferring")
