"""Signals of a run in progress: never journaled; an error of a listener is only logged."""

from __future__ import annotations

from django.dispatch import Signal

# A model's text as it is written, for a live view, sent with `run_id`, `step` and `text`. A reply that breaks
# off is requested again, so the same text may come twice; the journal has the complete reply once.
text_streamed = Signal()

# Sent after commit with the class Run as sender, `run_id`, and `event`, a name such as "run.failed"; the
# first two with `approval_id` as well. At most once: a process may die between commit and signal. Use
# AGENTRUNS_NOTIFIERS for notifications that must arrive.
approval_requested = Signal()
approval_decided = Signal()
run_orphaned = Signal()
run_paused = Signal()
run_ended = Signal()
