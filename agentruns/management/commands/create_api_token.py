"""`manage.py create_api_token USER --scope S [S ...]`: make a token of the JSON API, and print it once."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from agentruns.conf import settings
from agentruns.management.base import AgentRunsCommand, usage, user_named
from agentruns.management.terminal import escaped, moment
from agentruns.models import ApiToken
from agentruns.services.api_tokens import create_token


class Command(AgentRunsCommand):
    help = (
        "Make a token with which a program acts as a user in the JSON API, within scopes. The token is the "
        "last line of the output; it is stored nowhere and cannot be printed again."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("user", metavar="USER", help="The token's owner, whose permissions count.")
        parser.add_argument(
            "--scope",
            nargs="+",
            action="extend",
            required=True,
            choices=ApiToken.Scope.values,
            help="Scopes of the token.",
        )
        parser.add_argument("--name", default="", help="A name for people, in the admin.")
        parser.add_argument("--days", type=int, help="Expire after this many days (AGENTRUNS_TOKEN_DAYS).")

    def act(
        self, *, user: str, scope: list[str], name: str, days: int | None, json: bool, **options: Any
    ) -> None:
        owner = user_named(user)
        if days is not None and not 0 < days <= settings.TOKEN_MAX_DAYS:
            usage(f"--days takes 1 to {settings.TOKEN_MAX_DAYS} (AGENTRUNS_TOKEN_MAX_DAYS).")
        try:
            token, text = create_token(
                owner, scope, name=name, expires_in=timedelta(days=days) if days is not None else None
            )
        except ValueError as error:
            usage(escaped(error))
        if json:
            facts = {"prefix": token.prefix, "scopes": token.scopes, "expires_at": token.expires_at}
            self.say_json({**facts, "token": text})
            return
        until = f"expires {moment(token.expires_at)} UTC, or when {user}'s password changes"
        self.say(f"Token {token.prefix} acts as {user}: {', '.join(token.scopes)}; {until}.")
        self.say("Keep it where secrets are kept. It cannot be shown again:")
        self.stdout.write(text)  # not redacted: AGENTRUNS_REDACT would make it useless
