"""The model for a demo without an API key, which follows a transcript for each ticket."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from agentruns import ModelReply, ModelRequest
from agentruns.providers.base import ProviderError
from agentruns.testing import ScriptedModel

TICKET = re.compile(r"\bticket (\d+)", re.IGNORECASE)

PACE = "HELPDESK_PACE"  # the variable with the seconds for each word, so that people see a reply grow
UNFORESEEN = "A transcript has no answer to that; a real model would. I leave it to my colleagues."

# Results that lead to a side path: a person refused the call, or its outcome is in doubt.
SIDE_PATHS = {"Not executed": "if_refused", "tool-durability-error": "if_unknown"}


class TranscriptModel:
    """A model that replies from fixtures/transcripts/KIND-N.json for ticket N; each agent has its own kind.

    A transcript is `{"turns": [...]}` in ScriptedModel's format, with alternative endings under "if_refused"
    and "if_unknown".
    """

    identity = "project.helpdesk.model.TranscriptModel"

    def __init__(self, kind: str = "ticket") -> None:
        self.kind = kind

    def propose(self, request: ModelRequest) -> ModelReply:
        """Reply with the next turn of the ticket's transcript."""
        pace = float(os.environ.get(PACE) or 0)
        turns = self._turns(request)
        # A message during the run makes the run longer than its transcript.
        turns += [{"text": UNFORESEEN}] * (request.step + 1 - len(turns))
        reply = ScriptedModel(turns, pace=pace).propose(request)
        return replace(reply, usage=usage_of(request, reply.content))

    def _turns(self, request: ModelRequest) -> list[dict[str, Any]]:
        said = sum(message["role"] == "assistant" for message in request.messages)
        file = self._file(request)
        if said > request.step or (said and not file.exists()):  # what the transcripts do not foresee
            return []
        if not file.exists():
            raise ProviderError(
                "The task names no ticket for which its agent has a transcript: helpdesk has tickets 1 to 5 "
                "and 7, returns has ticket 6. Set ANTHROPIC_API_KEY and MODEL=claude-..., or "
                "OPENAI_API_KEY and MODEL=openai:gpt-..., to let a real model work on any task.",
                type="no_transcript",
            )
        transcript = json.loads(file.read_text(encoding="utf-8"))
        replies = 0
        for message in request.messages:
            if message["role"] == "assistant":
                replies += 1
            for sign, side_path in SIDE_PATHS.items():
                if side_path in transcript and any(sign in text for text in _results(message)):
                    return [*transcript["turns"][:replies], *transcript[side_path]]
        return list(transcript["turns"])

    def _file(self, request: ModelRequest) -> Path:
        found = TICKET.search(request.messages[0]["content"][0].get("text", ""))
        number = found[1] if found else 0
        return Path(settings.BASE_DIR / "fixtures" / "transcripts" / f"{self.kind}-{number}.json")


def usage_of(request: ModelRequest, said: Any) -> dict[str, int]:
    """Estimate the tokens that a real model would count."""
    read = len(request.system) + len(json.dumps([request.messages, request.tools]))
    return {"input_tokens": read // 4, "output_tokens": len(json.dumps(said)) // 4}


def _results(message: dict[str, Any]) -> list[str]:
    return [block["content"] for block in message["content"] if block["type"] == "tool_result"]
