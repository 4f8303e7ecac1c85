from __future__ import annotations

from datetime import timedelta
from typing import Any

from agentruns.conf import settings
from agentruns.management.base import AgentRunsCommand, argument, escaped, moment, usage, user_named
from agentruns.models import ApiToken
from agentruns.services.api_tokens import create_token


class Command(AgentRunsCommand):
    help = (
        "Make a token with which a program acts as a user in the JSON API, within scopes. The token is the "
        "last line of the output; it is stored nowhere and cannot be printed again."
    )

    arguments = (
        argument("user", "The token's owner, whose permissions count.", metavar="USER"),
        argument(
            "--scope",
            "Scopes of the token.",
            nargs="+",
            action="extend",
            required=True,
            choices=ApiToken.Scope.values,
        ),
        argument("--name", "A name for people, in the admin.", default=""),
        argument("--days", "Expire after this many days (AGENTRUNS_TOKEN_DAYS).", type=int),
    )

    def act(self, *, user: str, scope: list[str], name: str, days: int | None, **options: Any) -> None:
        owner = user_named(user)
        if days is not None and not 0 < days <= settings.TOKEN_MAX_DAYS:
            usage(f"--days takes 1 to {settings.TOKEN_MAX_DAYS} (AGENTRUNS_TOKEN_MAX_DAYS).")
        expires_in = timedelta(days=days) if days is not None else None
        try:
            token, text = create_token(owner, scope, name=name, expires_in=expires_in)
        except ValueError as error:
            usage(escaped(error))
        facts = {"prefix": token.prefix, "scopes": token.scopes, "expires_at": token.expires_at}
        until = f"expires {moment(token.expires_at)} UTC, or when {user}'s password changes"
        self.tell(
            {**facts, "token": text},
            f"Token {token.prefix} acts as {user}: {', '.join(token.scopes)}; {until}.",
            "Keep it where secrets are kept. It cannot be shown again:",
        )
        if not self.json:
            self.stdout.write(text)  # not by `say`, because a redacted token would be useless
