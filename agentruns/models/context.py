from __future__ import annotations

from typing import Any

from django.db import models

from agentruns.models.run import Run
from agentruns.utils.bounds import NAME_LENGTH, is_name, said

MOST = 16  # of one run
SENSITIVE = ("sensitive", "sensitive_results")  # of a tool in a definition


class ContextValue(models.Model):
    """A top-level value of a run's context, for search and filters: made with the run, erased with it."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="context_values")
    key = models.CharField(max_length=NAME_LENGTH)
    value = models.CharField(max_length=NAME_LENGTH)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["value", "key", "run"], name="agentruns_context_value")]

    def __str__(self) -> str:
        return self.key

    @classmethod
    def of(cls, run: Run, definition: dict[str, Any]) -> list[ContextValue]:
        """Return the values of a run that may be found: short ones, of names that no tool calls sensitive."""
        tools = definition.get("tools", {}).values() if run.context else ()
        hidden = {name for tool in tools for kind in SENSITIVE for name in tool.get(kind) or ()}
        texts = {name: said(value) for name, value in run.context.items() if name not in hidden}
        found = [(name, text) for name, text in texts.items() if text and is_name(name)]
        return [cls(run_id=run.pk, key=name, value=text) for name, text in found[:MOST]]
