from __future__ import annotations

from django.db import models


class CommitFence(models.Model):
    """A row that points at nothing: while it stands, the database refuses to commit the transaction it is in.

    A transactional handler works behind one, so that only the journal can commit, together with the result.
    Its foreign key is checked at the COMMIT, as Django declares all of them. The table is always empty.
    """

    nothing = models.ForeignKey("self", on_delete=models.DO_NOTHING, related_name="+", db_index=False)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"fence {self.pk}"
