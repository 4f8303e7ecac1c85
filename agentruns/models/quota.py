from __future__ import annotations

from django.db import models

from agentruns.utils.bounds import NAME_LENGTH


class StartCount(models.Model):
    """The runs that one user started in the hour since `since`; a row for each user with a quota."""

    # As text and no foreign key: users may live in another database.
    user_id = models.CharField(primary_key=True, max_length=NAME_LENGTH)
    since = models.DateTimeField()
    count = models.PositiveIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.user_id
