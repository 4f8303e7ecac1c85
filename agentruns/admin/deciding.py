"""What every page has on which approvals are decided: who may, what was done, and where to go on."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext as _

from agentruns.admin.queue import Queue
from agentruns.admin.readonly import ReadOnlyAdmin
from agentruns.admin.text import visible
from agentruns.models import Approval


class DecidingAdmin(ReadOnlyAdmin):
    """The base of the admin of approvals."""

    def has_decide_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether the user may decide approvals at all."""
        return bool(request.user.has_perm("agentruns.decide_approval"))

    def tell(
        self, request: HttpRequest, approval: Approval, text: str, level: int = messages.SUCCESS
    ) -> None:
        """Say what became of an approval, with a link to it."""
        link = format_html(
            '<a href="{}">{}</a>', self.url(request, "change", approval.pk), visible(approval.title)
        )
        self.message_user(request, format_html("{} {}", text, link), level)

    def onward(self, request: HttpRequest, approval: Approval, cards: Queue) -> HttpResponse:
        """Open the next card that this user can decide, or the list that says that there is none."""
        following = cards.after(approval)
        if following is not None:
            return HttpResponseRedirect(self.url(request, "change", following))
        self.message_user(request, _("Nothing more here waits for you."), messages.INFO)
        return HttpResponseRedirect(self.url(request, "changelist"))
