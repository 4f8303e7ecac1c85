"""API tokens: credentials of programs and browsers, whose text is shown once and stored only as a digest."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID
from zlib import crc32

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.signing import b62_encode
from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, Q
from django.db.models.functions import Now
from django.utils.crypto import get_random_string
from django.utils.translation import gettext as _

from agentruns import exceptions
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events, policy
from agentruns.journal.batch import Batch
from agentruns.journal.deciders import API_CHANNEL, void, withdrawn
from agentruns.models import ApiToken, Approval, Message, Run, Session
from agentruns.services import permissions
from agentruns.services.runs.sessions import Owner, require_known_scope
from agentruns.services.runs.write import require_no_record, write
from agentruns.utils import clock, json as canonical
from agentruns.utils.bounds import check_name
from agentruns.utils.db import delete_rows, later
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tokens")

USED_EVERY = 60  # seconds between two notes that a token is in use

_PREFIX, _SECRET, _CHECKSUM = 12, 43, 6  # characters; 43 of 62 are 256 bits
_TOKEN = re.compile(rf"(ar_[a-z0-9]{{{_PREFIX}}})_[A-Za-z0-9]{{{_SECRET + _CHECKSUM}}}")
_NOBODYS = canonical.sha256("")  # compared for an unknown prefix, so that the answer takes the same time
VALID = Q(revoked_at__isnull=True, expires_at__gt=Now())


def create_token(
    owner: Any,
    scopes: Iterable[str],
    *,
    name: str = "",
    expires_in: timedelta | None = None,
    actor: Any = None,
) -> tuple[ApiToken, str]:
    """Create a token that acts as the user `owner` within `scopes`; return the token and its text.

    The text is not stored. The token ends after `expires_in` (None: AGENTRUNS_TOKEN_DAYS), or when the
    owner's password changes. Raises ValueError for an unknown scope or none, a bad name, or a lifetime that
    is not positive or over AGENTRUNS_TOKEN_MAX_DAYS; TypeError or PermissionDeniedError if `owner` is no
    user; PermissionDeniedError if `actor` is another user than the owner, or asks for the scope
    `runs:act_for` and may not act for others.
    """
    known, whose = ApiToken.Scope.values, Owner.of_user(owner)
    asked = set(scopes)
    is_program = events.is_program(actor)
    if not (is_program or (policy.is_somebody(actor) and actor.pk == whose.id)):
        raise PermissionDeniedError(_("A token acts as its owner: users make tokens for themselves only."))
    if ApiToken.Scope.RUNS_ACT_FOR in asked and not is_program:
        _require_act_for(actor, actor, policy.current().scope(actor))
    if not asked or not asked <= set(known):
        raise ValueError(f"A token needs scopes, each one of: {', '.join(known)}.")
    if len(name) > 100 or not name.isprintable():
        raise ValueError("A token's name is one line of at most 100 characters.")
    lifetime = timedelta(days=settings.TOKEN_DAYS) if expires_in is None else expires_in
    if not timedelta() < lifetime <= timedelta(days=settings.TOKEN_MAX_DAYS):
        raise ValueError(f"A token's lifetime must be positive and at most {settings.TOKEN_MAX_DAYS} days.")
    if events.person_id(owner) is not None:  # whom no request with the token would name
        raise PermissionDeniedError(_("Nobody makes a token in another person's name."))
    granted = [scope for scope in known if scope in asked]
    token, text = _make(lifetime, owner, name=name, scopes=granted, owner_id=whose.id)
    logger.info("API token made prefix=%s owner=%s scopes=%s", token.prefix, owner.pk, " ".join(token.scopes))
    return token, text


def _require_act_for(actor: Any, owner: Any, scope: str) -> None:
    """Raise PermissionDeniedError unless an actor may act for `owner`, None if not active, in a scope."""
    if owner is None or not permissions.may(actor, "act_for", (owner, scope)):
        raise PermissionDeniedError(permissions.why_not(actor, "act_for"))


def _make(lifetime: timedelta, owner: Any = None, **columns: Any) -> tuple[ApiToken, str]:
    """Store a new token; return it and its text, which is `ar_`, a prefix, a secret and their checksum."""
    prefix = f"ar_{get_random_string(_PREFIX).lower()}"
    begun = f"{prefix}_{get_random_string(_SECRET)}"
    text = begun + _checksum(begun)
    columns |= {} if owner is None else {"credential": credentials(text, owner)[0]}
    ends, tokens = clock.now(settings.DATABASE) + lifetime, ApiToken.objects.using(settings.DATABASE)
    token = ApiToken(prefix=prefix, digest=canonical.sha256(text), expires_at=ends, **columns)
    tokens.bulk_create([token])
    # The descriptor would refuse a user from another database than the journal's.
    ApiToken._meta.get_field("owner").set_cached_value(token, owner)
    return token, text


def authenticate(text: str) -> ApiToken | None:
    """Find the token with this text and set its owner, if it has one; None if the text gives no access.

    An unknown, mistyped, expired or revoked token gives no access. A user's token also gives no access if the
    user was deleted, is inactive, has changed the password, or is another person under the same id. Stores
    the time of use after the commit, at most every USED_EVERY seconds.
    """
    shape = _TOKEN.fullmatch(text)
    if shape is None or text[-_CHECKSUM:] != _checksum(text[:-_CHECKSUM]):
        return None
    due = Q(last_used_at__isnull=True) | Q(last_used_at__lte=later(-USED_EVERY))
    tokens = ApiToken.objects.using(settings.DATABASE)
    annotated = tokens.annotate(is_due=ExpressionWrapper(due, BooleanField()))
    token = annotated.filter(VALID, prefix=shape[1]).first()
    is_right = hmac.compare_digest(token.digest if token else _NOBODYS, canonical.sha256(text))
    if token is None or not is_right:
        return None
    owner = owners([token]).get(token.owner_id)
    if token.session_id is None:  # bound to its owner, and to the password that they had when it was made
        if owner is None or not owner.is_active:
            return None
        given = credentials(text, owner)
        matching = [each for each in given if hmac.compare_digest(token.credential, each)]
        if not matching:
            return None
        if matching[0] != given[0]:  # SECRET_KEY was rotated, and its fallback will be removed
            bound = tokens.filter(pk=token.pk, credential=token.credential)
            renew = partial(bound.update, credential=given[0])
            transaction.on_commit(renew, using=settings.DATABASE, robust=True)
    if token.is_due:
        used = tokens.filter(due, pk=token.pk)
        # After the request's transaction: the row would else be locked, or refused, for every other request.
        transaction.on_commit(lambda: used.update(last_used_at=Now()), using=settings.DATABASE, robust=True)
    ApiToken._meta.get_field("owner").set_cached_value(token, owner)
    return token


def credentials(text: str, owner: Any) -> list[str]:
    """Compute digests of the owner's password, one by SECRET_KEY and one by each of SECRET_KEY_FALLBACKS."""
    # Empty passwords are equal, so a fingerprint also has the time when the user joined, or the name.
    joined = getattr(owner, "date_joined", None)
    who = str(joined.timestamp()) if joined else owner.get_username()
    if hasattr(owner, "get_session_auth_hash"):
        fallbacks: Iterable[str] = getattr(owner, "get_session_auth_fallback_hash", list)()
        passwords = [owner.get_session_auth_hash(), *fallbacks]
    else:
        passwords = [getattr(owner, "password", "")]
    # Keyed by the token, which is not stored, so that nobody can guess a password.
    return [hmac.new(text.encode(), f"{who} {each}".encode(), "sha256").hexdigest() for each in passwords]


def _checksum(text: str) -> str:
    """Compute a text's CRC32 in base 62, as in GitHub's tokens, so that scanners recognise a real token."""
    return b62_encode(crc32(text.encode())).rjust(_CHECKSUM, "0")


def session_token(
    session: Session | str, ttl: timedelta, *, scope: str | None = None, actor: Any = None
) -> str:
    """Create a token with which a browser without a user reads, writes and confirms calls in one session.

    If `session` is a key, finds the session in `scope` (None: the policy's scope for `actor`) or creates
    it. The token ends after `ttl`, when it is revoked, or when the session is deleted. Raises ValueError for
    a bad key, or a `ttl` that is not positive or over AGENTRUNS_SESSION_TOKEN_SECONDS; AmbiguousSessionError
    if `scope` is None, and not the program's scope but others have the key; SessionAccessDeniedError if the
    session of a key belongs to a user, or a run in it was started for a user; RunStateError for an imported
    session; PermissionDeniedError if `actor` is a user who neither owns the session nor may act for its owner
    in its scope.
    """
    longest = timedelta(seconds=settings.SESSION_TOKEN_SECONDS)
    if not timedelta() < ttl <= longest:
        raise ValueError(f"A session token's lifetime must be positive and at most {longest}.")
    if not isinstance(session, Session):
        check_name("session", session)
        if not session:
            raise ValueError("A session token needs the key of a session.")
        if scope is None:
            scope = policy.current().scope(None if events.is_program(actor) else actor)
            if events.is_program(actor):  # a user does not learn of other scopes
                require_known_scope(session, scope)
        where = {"key": session, "scope": scope}
        if not events.is_program(actor):
            _require_act_for(actor, AnonymousUser(), scope)
        sessions = Session.objects.using(settings.DATABASE)
        sessions.bulk_create([Session(**where)], ignore_conflicts=True)
        session = sessions.get(**where)
        rows = Message.objects.using(settings.DATABASE).filter(session_id=session.pk, kind=events.RUN_STARTED)
        begun = [facts for facts in rows.values_list("facts", flat=True) if events.COPIED not in facts]
        # A user may have taken the key first, to read what a visitor writes.
        if session.owner_id is not None or any(facts.get("owner") for facts in begun):
            why = _("Session %(session)r belongs to a user. To let a visitor in, pass the Session itself.")
            raise exceptions.SessionAccessDeniedError(why % {"session": session.key})
    if not events.is_program(actor) and (session.owner_id is None or session.owner_id != actor.pk):
        owner = AnonymousUser() if session.owner_id is None else permissions.active_user(session.owner_id)
        _require_act_for(actor, owner, session.scope)
    require_no_record(session)
    of_session = ApiToken.objects.using(settings.DATABASE).filter(session_id=session.pk)
    runs = Run.objects.using(settings.DATABASE).filter(session_id=session.pk, status__in=Run.UNFINISHED)
    if not runs.exists():  # an approval counts while the row of its token is there
        delete_rows(of_session.filter(expires_at__lte=Now()))  # each load of a chat page makes a token
    token, text = _make(ttl, session_id=session.pk)
    logger.info("Session token made prefix=%s session=%s", token.prefix, session.pk)
    return text


def revoke(token_id: UUID | str, actor: Any) -> bool:
    """Revoke a token at once and for good; return False if it was revoked before.

    Voids the approvals given with the token whose calls have not started, those of a run that a worker drives
    when their calls would start.
    Raises NotFoundError, also for a token that the project's policy hides, and PermissionDeniedError unless
    `may_revoke` lets the actor revoke the token.
    """
    alias, tokens = settings.DATABASE, ApiToken.objects.using(settings.DATABASE)
    seen = policy.visible_tokens(actor) if permissions.hides(actor, "visible_tokens") else tokens
    try:
        token = seen.get(pk=UUID(str(token_id)))
    except (ApiToken.DoesNotExist, ValueError):
        raise exceptions.NotFoundError(_("There is no API token %(id)s.") % {"id": token_id}) from None
    if not may_revoke(actor, token):
        text = _(
            "%(name)s may not revoke token %(token)s: it is somebody else's, and permission "
            "%(permission)s is missing."
        )
        facts = {"name": actor.get_username(), "token": token.prefix}
        raise PermissionDeniedError(text % {**facts, "permission": policy.ACTIONS["revoke"][0]})
    revoked = tokens.filter(pk=token.pk, revoked_at__isnull=True).update(revoked_at=Now())
    if revoked:
        logger.info("API token revoked prefix=%s by=%s", token.prefix, events.logged(actor))

    def void_given(run: Run, batch: Batch) -> None:
        # A live worker, for whose append the session was locked until now, looks at the token itself.
        for call in batch.state.run.open_calls() if batch.epoch else ():
            void(batch, call, withdrawn(alias, call.approval))

    is_given = Q(status=Approval.Status.APPROVED) | Q(status=Approval.Status.PENDING, approved_count__gt=0)
    given = Approval.objects.using(alias).filter(is_given, run__status__in=Run.UNFINISHED)
    rows = Message.objects.using(alias).filter(kind=events.APPROVAL_DECIDED, run__in=given.values("run"))
    decided, channel = rows.values_list("run_id", "facts"), API_CHANNEL + token.prefix
    for run_id in {run for run, facts in decided if facts.get("channel") == channel}:
        try:
            write(run_id, void_given, takes_lease=True)
        except exceptions.AgentRunsError:
            logger.info("Not voided now run=%s token=%s", run_id, token.prefix, exc_info=True)
    return bool(revoked)


def may_revoke(actor: Any, token: ApiToken) -> bool:
    """Check whether an actor may revoke a token: as the program, as its active owner, or by permission."""
    if permissions.may(actor, "revoke", token):
        return True
    return bool(actor.is_active and actor.pk is not None and actor.pk == token.owner_id)


def owners(tokens: Iterable[ApiToken]) -> dict[Any, Any]:
    """Map the owner id of each token to the user, read from the users' own database; omit deleted users."""
    return get_user_model()._default_manager.in_bulk({token.owner_id for token in tokens} - {None})
