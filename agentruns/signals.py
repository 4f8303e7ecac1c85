"""What a project may listen to while a run goes on: never journaled, and a listener's error is lost."""

from __future__ import annotations

from django.dispatch import Signal

# Text as a model writes it, for a live view: sent with `run_id`, `step` and `text`. A reply that breaks off
# is asked for again, so the same text may come twice; the journal has the complete reply, once.
text_streamed = Signal()
