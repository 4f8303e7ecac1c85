from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from uuid import UUID

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, now, user_key
from agentruns.models.session import Session
from agentruns.utils.ids import uuid7


class ApiToken(models.Model):
    """A credential for the API: for a program that acts as its owner, or for a browser in one session."""

    class Scope(models.TextChoices):
        RUNS_READ = "runs:read", _("read runs")
        RUNS_WRITE = "runs:write", _("start and control runs")
        RUNS_ACT_FOR = "runs:act_for", _("start runs for other users and in other scopes")
        APPROVALS_DECIDE = "approvals:decide", _("read and decide approvals")
        APPROVALS_OWN = "approvals:own", _("confirm calls of the owner's own runs")
        EVENTS_WRITE = "events:write", _("deliver events")
        RULES_WRITE = "rules:write", _("write, try, activate and stop standing rules")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    # The token itself is not stored: its prefix finds the row, its digest proves the rest.
    prefix = models.CharField(_("prefix"), max_length=16, unique=True)
    digest = models.CharField(_("digest"), max_length=64)
    name = models.CharField(_("name"), max_length=100, default="")
    scopes = CanonicalField(_("scopes"), default=list)
    owner = user_key(_("owner"), "agentruns_tokens")
    # Proof of the owner's password at creation: a new password, or another user of the key, ends the token.
    credential = models.CharField(max_length=64, default="", editable=False)
    session = models.ForeignKey(
        Session, verbose_name=_("session"), null=True, on_delete=models.CASCADE, related_name="tokens"
    )
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)
    expires_at = models.DateTimeField(_("expires at"))
    last_used_at = models.DateTimeField(_("last used at"), null=True)
    revoked_at = models.DateTimeField(_("revoked at"), null=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")
        default_permissions = ("view",)
        permissions = [("revoke_api_token", _("Can revoke API tokens"))]
        constraints = [
            models.CheckConstraint(
                condition=Q(owner__isnull=False, session__isnull=True)
                | Q(owner__isnull=True, session__isnull=False),
                name="agentruns_token_bearer",
            )
        ]

    def __str__(self) -> str:
        return f"{self.prefix}…"


@dataclass(frozen=True, slots=True)
class SessionBearer:
    """The visitor with a session token, who is no user, owns nothing and has no permission."""

    session_id: UUID

    pk = None
    is_authenticated = True
    is_active = True
    is_anonymous = False
    is_staff = False
    is_superuser = False

    @property
    def actor_id(self) -> str:
        """The visitor's id in the journal."""
        return f"{VISITOR}{self.session_id}"

    def get_username(self) -> str:
        """Return the name that the journal gives to every visitor of a session."""
        return "the session's visitor"

    def key(self, key: str) -> str:
        """Hash a visitor's idempotency key with the session, so that keys of two sessions never meet."""
        return sha256(f"{self.session_id}:{key}".encode()).hexdigest()

    def has_perm(self, permission: str, obj: object = None) -> bool:
        """Return False, because a visitor has no permission."""
        return False


VISITOR = "session:"  # how the id of a session's visitor begins in the journal
