"""API tokens, the credentials of programs. Made once, shown once, stored only as a digest."""

from __future__ import annotations

import hmac
import re
import secrets
import string
from collections.abc import Iterable
from datetime import timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import NotFoundError, PermissionDeniedError
from agentruns.models import ApiToken
from agentruns.services import permissions
from agentruns.utils import clock
from agentruns.utils.db import later
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tokens")

PERMISSION = "agentruns.revoke_api_token"
USED_EVERY = 60  # seconds between two notes that a token is in use
LONGEST = timedelta(days=36_500)

_PREFIX, _SECRET = 12, 32  # characters; bytes
_TOKEN = re.compile(rf"(ar_[a-z0-9]{{{_PREFIX}}})_[A-Za-z0-9_-]{{43}}")
_VALID = Q(revoked_at__isnull=True) & (Q(expires_at__isnull=True) | Q(expires_at__gt=Now()))
_NOBODYS = sha256(b"").hexdigest()  # compared with where there is no such prefix, so that it costs the same


def create_token(
    owner: Any, scopes: Iterable[str], *, name: str = "", expires_in: timedelta | None = None
) -> tuple[ApiToken, str]:
    """Make a token that acts as `owner` within `scopes`; return it with its text, which is not stored.

    Raises ValueError for an unknown scope or none, a name that is no name, or a time that is over already.
    """
    known = ApiToken.Scope.values
    asked = set(scopes)
    if not asked or not asked <= set(known):
        raise ValueError(f"A token needs scopes, each one of: {', '.join(known)}.")
    if len(name) > 100 or not name.isprintable():
        raise ValueError("A token's name is one line of at most 100 characters.")
    if expires_in is not None and not timedelta() < expires_in <= LONGEST:
        raise ValueError("A token's lifetime must be positive and at most 36500 days.")
    prefix = "ar_" + "".join(
        secrets.choice(string.ascii_lowercase + string.digits) for _place in range(_PREFIX)
    )
    text = f"{prefix}_{secrets.token_urlsafe(_SECRET)}"
    token = ApiToken.objects.using(settings.DATABASE).create(
        prefix=prefix,
        digest=_digest(text),
        name=name,
        scopes=[scope for scope in known if scope in asked],
        owner_id=owner.pk,
        expires_at=clock.now(settings.DATABASE) + expires_in if expires_in is not None else None,
    )
    logger.info("API token made prefix=%s owner=%s scopes=%s", prefix, owner.pk, " ".join(token.scopes))
    return _of(token, owner), text


def authenticate(text: str) -> ApiToken | None:
    """Return the token of this text with its current owner; None if it gives no access.

    No access: unknown, expired or revoked tokens, and owners who are gone or inactive.
    """
    shape = _TOKEN.fullmatch(text)
    if shape is None:
        return None
    due = Q(last_used_at__isnull=True) | Q(last_used_at__lte=later(-USED_EVERY))
    tokens = ApiToken.objects.using(settings.DATABASE)
    found = tokens.annotate(is_due=ExpressionWrapper(due, BooleanField()))
    token = found.filter(_VALID, prefix=shape[1]).first()
    is_right = hmac.compare_digest(token.digest if token else _NOBODYS, _digest(text))
    if token is None or not is_right:
        return None
    owner = owners([token]).get(token.owner_id)
    if owner is None or not owner.is_active:
        return None
    if token.is_due:
        _note_use(token.pk, due)
    return _of(token, owner)


def revoke(token_id: UUID | str, actor: Any) -> bool:
    """End a token at once and for good; return False if it was revoked before.

    Raises NotFoundError if there is no such token, PermissionDeniedError unless it is the actor's
    own or they may revoke everybody's.
    """
    token = find_token(token_id)
    if not may_revoke(actor, token):
        raise PermissionDeniedError(
            _(
                "%(name)s may not revoke token %(token)s: it is somebody else's, and permission "
                "%(permission)s is missing."
            )
            % {"name": actor.get_username(), "token": token.prefix, "permission": PERMISSION}
        )
    tokens = ApiToken.objects.using(settings.DATABASE)
    revoked = tokens.filter(pk=token.pk, revoked_at__isnull=True).update(revoked_at=Now())
    if revoked:
        logger.info("API token revoked prefix=%s by=%s", token.prefix, getattr(actor, "pk", None))
    return bool(revoked)


def may_revoke(actor: Any, token: ApiToken) -> bool:
    """Tell whether this user may revoke this token: their own, or anybody's with the permission."""
    if permissions.may(actor, PERMISSION):
        return True
    return bool(actor.is_active and actor.pk is not None and actor.pk == token.owner_id)


def find_token(token_id: UUID | str) -> ApiToken:
    """Return a token, or raise NotFoundError."""
    try:
        return ApiToken.objects.using(settings.DATABASE).get(pk=UUID(str(token_id)))
    except (ApiToken.DoesNotExist, ValueError):
        raise NotFoundError(_("There is no API token %(id)s.") % {"id": token_id}) from None


def owners(tokens: Iterable[ApiToken]) -> dict[Any, Any]:
    """Return the owners of tokens by id, from the users' own database; deleted users are missing."""
    return get_user_model()._default_manager.in_bulk({token.owner_id for token in tokens})


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _of(token: ApiToken, owner: Any) -> ApiToken:
    # Past the descriptor: it asks the journal's database for users, and refuses those of another one.
    ApiToken._meta.get_field("owner").set_cached_value(token, owner)
    return token


def _note_use(token_id: UUID, due: Q) -> None:
    tokens = ApiToken.objects.using(settings.DATABASE).filter(due, pk=token_id)
    # After the request's transaction: the row would else be locked, or refused, for every other request.
    transaction.on_commit(lambda: tokens.update(last_used_at=Now()), using=settings.DATABASE, robust=True)
