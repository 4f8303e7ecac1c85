from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import EscapedTextField, PersonNameField, PrefixIndex, now, user_key
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.ids import secret, uuid7
from agentruns.utils.json import GENESIS
from agentruns.utils.redaction import redact


class Session(models.Model):
    """A conversation under the caller's own key in a scope, with the head of its journal's hash chain."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    scope = models.CharField(_("scope"), max_length=NAME_LENGTH, default="")
    key = models.CharField(_("key"), max_length=NAME_LENGTH)
    title = EscapedTextField(_("title"), default="")  # first line of its first task
    # Key of the digests of its calls, without which nobody can guess their arguments.
    secret = models.CharField(max_length=64, default=secret, editable=False)
    owner = user_key(_("owner"), "agentruns_sessions")
    owner_name = PersonNameField(_("owner's name"), max_length=NAME_LENGTH, default="")
    next_seq = models.BigIntegerField(default=1)
    head = models.CharField(max_length=64, default=GENESIS)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)
    imported_at = models.DateTimeField(_("imported at"), null=True)  # then it is a record: nothing is added

    class Meta:
        verbose_name = _("session")
        verbose_name_plural = _("sessions")
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["scope", "key"], name="agentruns_key_in_scope")]
        # An append changes neither column, and so writes no index of the table.
        indexes = [
            PrefixIndex(fields=["key"], name="agentruns_key_begins"),
            PrefixIndex(fields=["owner_name"], name="agentruns_requester_begins"),
        ]

    def __str__(self) -> str:
        return redact(self.key)
