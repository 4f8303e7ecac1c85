from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import EscapedTextField, PersonNameField, now
from agentruns.models.run import Run
from agentruns.utils.bounds import NAME_LENGTH


class Review(models.Model):
    """The opinion of people on a run, and who sees to it: no part of the journal, deleted with the run."""

    class Rating(models.IntegerChoices):
        BAD = -1, _("bad")
        NONE = 0, _("not rated")
        GOOD = 1, _("good")

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="review")
    rating = models.SmallIntegerField(choices=Rating.choices, default=Rating.NONE)
    note = EscapedTextField(default="")
    assignee = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="agentruns_assigned",
    )
    assignee_name = PersonNameField(max_length=NAME_LENGTH, default="")
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="agentruns_reviews",
    )
    author_name = PersonNameField(max_length=NAME_LENGTH, default="")
    created_at = models.DateTimeField(default=now, editable=False)
    updated_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["rating"], name="agentruns_review_rating")]

    def __str__(self) -> str:
        return str(self.pk)
