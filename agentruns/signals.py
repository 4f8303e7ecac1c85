"""What a project may listen to while a run goes on: never journaled, a listener's error only logged."""

from __future__ import annotations

from django.dispatch import Signal

# Text as a model writes it, for a live view: sent with `run_id`, `step` and `text`. A reply that breaks off
# is asked for again, so the same text may come twice; the journal has the complete reply, once.
text_streamed = Signal()

# After the commit of what they tell of, with the class Run as sender, `run_id` and `event`, which is a name
# such as "run.failed"; the first two with `approval_id` as well. At most once: a process may die between the
# commit and the signal. What must arrive goes through AGENTRUNS_NOTIFIERS.
approval_requested = Signal()
approval_decided = Signal()
run_orphaned = Signal()
run_paused = Signal()
run_ended = Signal()
