from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField

if TYPE_CHECKING:
    from agentruns.agents.agent import Agent


class Definition(models.Model):
    """What runs are started with: model, parameters, instructions, tool schemas and policies."""

    hash = models.CharField(_("hash"), max_length=64, primary_key=True)
    body = CanonicalField(_("body"))
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)

    class Meta:
        verbose_name = _("definition")
        verbose_name_plural = _("definitions")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.hash[:12]


def store_definition(alias: str, agent: Agent) -> None:
    """Keep what an agent is now, unless the same is kept already."""
    definition = Definition(hash=agent.definition_hash, body=agent.definition())
    Definition.objects.using(alias).bulk_create([definition], ignore_conflicts=True)


def definition_body(alias: str, digest: str) -> dict[str, Any]:
    """Return a definition by its digest; `run.definition` might be read from a replica."""
    body: dict[str, Any] = Definition.objects.using(alias).values_list("body", flat=True).get(pk=digest)
    return body
