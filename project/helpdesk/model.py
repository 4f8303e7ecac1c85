"""The model used without an API key: it follows a transcript for each ticket."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from django.conf import settings

from agentruns import ModelReply, ModelRequest
from agentruns.providers.base import ProviderError
from agentruns.testing import ScriptedModel

TICKET = re.compile(r"\bticket (\d+)", re.IGNORECASE)

# Results that lead to a side path: a person refused the call, or its outcome is in doubt.
SIDE_PATHS = {"Not executed": "if_refused", "tool-durability-error": "if_unknown"}


class TranscriptModel:
    """A model that replies from fixtures/transcripts/ticket-N.json for ticket N.

    A transcript is `{"turns": [...]}` in ScriptedModel's format, with alternative endings under "if_refused"
    and "if_unknown".
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or settings.BASE_DIR / "fixtures" / "transcripts"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Return the next turn of the ticket's transcript."""
        return ScriptedModel(self._turns(request)).propose(request)

    def _turns(self, request: ModelRequest) -> list[dict[str, Any]]:
        transcript = json.loads(self._file(request).read_text(encoding="utf-8"))
        replies = 0
        for message in request.messages:
            if message["role"] == "assistant":
                replies += 1
            for sign, side_path in SIDE_PATHS.items():
                if side_path in transcript and any(sign in text for text in _results(message)):
                    return [*transcript["turns"][:replies], *transcript[side_path]]
        return list(transcript["turns"])

    def _file(self, request: ModelRequest) -> Path:
        task = request.messages[0]["content"][0].get("text", "")
        found = TICKET.search(task)
        file = self.folder / f"ticket-{found[1]}.json" if found else None
        if file is None or not file.exists():
            raise ProviderError(
                "There are transcripts for tickets 1 to 5 only, and the task names none of them. "
                "Set ANTHROPIC_API_KEY and MODEL=claude-... to let a real model work on any task.",
                type="no_transcript",
            )
        return file


def _results(message: dict[str, Any]) -> list[str]:
    return [block["content"] for block in message["content"] if block["type"] == "tool_result"]
