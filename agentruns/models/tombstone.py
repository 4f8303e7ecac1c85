from __future__ import annotations

from django.conf import settings as django_settings
from django.db import models
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, now, user_key
from agentruns.utils import json as canonical
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.redaction import redact

FORGOTTEN, KEYED = "sha256:", "hmac:"
NAMED = "session"  # member of the immutable `idempotency_keys` with the hash of the session's key


class Tombstone(models.Model):
    """The remains of a pruned session. While it exists, the triggers allow that its rows are deleted."""

    session_id = models.UUIDField(primary_key=True)
    scope = models.CharField(_("scope"), max_length=NAME_LENGTH, default="")
    key = models.CharField(_("key"), max_length=NAME_LENGTH)
    head = models.CharField(_("head"), max_length=64)
    # Hashes of the keys, with the ids of their runs.
    idempotency_keys = CanonicalField(_("idempotency keys"), default=dict)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        verbose_name = _("tombstone")
        verbose_name_plural = _("tombstones")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return redact(self.key)


class PrunedKey(models.Model):
    """An idempotency key of a pruned run. The run's owner cannot use the key again in the run's scope."""

    tombstone = models.ForeignKey(
        Tombstone, on_delete=models.PROTECT, related_name="pruned_keys", db_index=False
    )
    owner = user_key(_("owner"), "agentruns_pruned_keys", db_index=False)
    key = models.CharField(_("idempotency key"), max_length=NAME_LENGTH)
    run_id = models.UUIDField(_("run"))

    class Meta:
        verbose_name = _("pruned key")
        verbose_name_plural = _("pruned keys")
        default_permissions = ("view",)
        # The key comes first: the program may not know whose session it was.
        indexes = [models.Index(fields=["key", "owner"], name="agentruns_pruned_key")]

    def __str__(self) -> str:
        return redact(self.key)


def forgotten(key: str) -> str:
    """Hash a session's or idempotency key, so that only a known key is recognised; keep a hash as it is."""
    return key if key.startswith((FORGOTTEN, KEYED)) else FORGOTTEN + canonical.sha256(key)


def keyed(key: str, secret: str | bytes | None = None) -> str:
    """Compute the HMAC of an idempotency key by SECRET_KEY, or by another secret."""
    return KEYED + salted_hmac("agentruns.key", key, secret=secret, algorithm="sha256").hexdigest()


def names_of(key: str) -> list[str]:
    """List an idempotency key and all hashes that stand for it, also by each of SECRET_KEY_FALLBACKS."""
    fallbacks = (keyed(key, secret) for secret in django_settings.SECRET_KEY_FALLBACKS)
    return [key, forgotten(key), keyed(key), *fallbacks]
