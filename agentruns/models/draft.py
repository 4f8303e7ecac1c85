from __future__ import annotations

from django.db import models

from agentruns.models.fields import EscapedTextField
from agentruns.models.run import Run


class Draft(models.Model):
    """The text of a reply while it is written, for who watches the run: no part of the journal.

    Event streams make the row and renew `watched_until`; the worker stores the text, as it may be shown. It
    counts while `epoch` and `step` are the run's own: no zombie's, and of no reply that the journal has.
    """

    run = models.OneToOneField(
        Run, primary_key=True, on_delete=models.CASCADE, db_constraint=False, related_name="draft"
    )
    watched_until = models.DateTimeField()
    epoch = models.BigIntegerField(default=0)
    step = models.PositiveIntegerField(default=0)
    text = EscapedTextField(default="")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"draft of {self.pk}"
