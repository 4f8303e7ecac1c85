"""Signals about runs. They are never journaled, and an error of a receiver is only logged."""

from django.dispatch import Signal

# A piece of a model's reply for a live view, sent with `run_id`, `step` and `text`. A reply that breaks off
# is requested again, so the same text may be sent twice; the journal has the complete reply once.
text_streamed = Signal()

# These are sent after the commit, with the class Run as sender, `run_id`, and `event`, a name such as
# "run.failed"; the first four also with `approval_id`. Each is sent at most once, because a process may die
# between commit and signal. Use AGENTRUNS_NOTIFIERS for notifications that must arrive.
approval_requested = Signal()
approval_decided = Signal()
approval_reminded = Signal()
approval_escalated = Signal()
run_orphaned = Signal()
run_paused = Signal()
budget_low = Signal()
run_ended = Signal()
