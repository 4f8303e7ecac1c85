from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, now
from agentruns.utils.ids import uuid7


class ApiToken(models.Model):
    """A program's credential for the API: it acts as its owner, within its scopes, until it ends."""

    class Scope(models.TextChoices):
        RUNS_READ = "runs:read", _("read runs")
        RUNS_WRITE = "runs:write", _("start and control runs")
        APPROVALS_DECIDE = "approvals:decide", _("read and decide approvals")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    # The token itself is not stored: its prefix finds the row, its digest proves the rest.
    prefix = models.CharField(_("prefix"), max_length=16, unique=True)
    digest = models.CharField(_("digest"), max_length=64)
    name = models.CharField(_("name"), max_length=100, default="")
    scopes = CanonicalField(_("scopes"), default=list)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        verbose_name=_("owner"),
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="agentruns_tokens",
    )
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)
    expires_at = models.DateTimeField(_("expires at"), null=True)
    last_used_at = models.DateTimeField(_("last used at"), null=True)
    revoked_at = models.DateTimeField(_("revoked at"), null=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")
        default_permissions = ("view",)
        permissions = [("revoke_api_token", _("Can revoke API tokens"))]

    def __str__(self) -> str:
        return f"{self.prefix}…"
