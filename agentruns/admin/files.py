"""Downloads: a run for an auditor, and the content of a row that is stored in a file."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.translation import gettext as _

from agentruns.admin import badges
from agentruns.admin.overview import RunOverview
from agentruns.admin.paging import LARGEST
from agentruns.admin.text import Fact, plain, visible
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, PayloadError
from agentruns.models import Run
from agentruns.services.transfer import REVEAL, Content, download, download_export, find_content, read_content


class RunFiles(RunOverview):
    """The downloads of a run: its export, and the content of a row; for the admin of runs."""

    content_template = "agentruns/admin/content.html"

    def get_urls(self) -> list[URLPattern]:
        """Add the content of one journal row."""
        # A file may take long to read, and no transaction is to wait for it.
        view = transaction.non_atomic_requests(using=settings.DATABASE)(_view(self))
        where = "<str:object_id>/rows/<int:seq>/content/"
        export = self.admin_site.admin_view(self.export_view)
        return [
            path(where, self.admin_site.admin_view(view), name=self.name("content")),
            path("<str:object_id>/export/", export, name=self.name("export")),
            *super().get_urls(),
        ]

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the button that exports."""
        return {**super().sections(request, run), "export_url": self.url(request, "export", run.pk)}

    def export_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """Stream the run for an auditor, redacted, and log that it left."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, run)
        self.log_change(request, run, _("Exported for an auditor."))
        return download_export(request, run)

    def content_view(self, request: HttpRequest, object_id: str, seq: int) -> HttpResponseBase:
        """Stream what a row holds only the beginning of; what is guarded only when asked for by POST."""
        run = self.find(request, object_id)
        try:
            content = find_content(run, seq if seq < LARGEST else 0)
        except DurableRunNotFoundError as error:
            raise Http404(str(error)) from error
        except PayloadError as error:
            return self._content_page(request, run, seq, None, status=409, refusal=plain(error))
        if content.guarded and request.method != "POST":
            return self._content_page(request, run, seq, content)
        if content.guarded and not request.user.has_perm(REVEAL):
            raise PermissionDenied
        try:
            chunks = read_content(content, request.user)
        except PayloadError as error:
            return self._content_page(request, run, seq, content, status=409, refusal=plain(error))
        if content.guarded:
            self.log_change(request, run, _("Downloaded the true content of row %d.") % seq)
        return download(request, content, chunks)

    def _content_page(
        self,
        request: HttpRequest,
        run: Run,
        seq: int,
        content: Content | None,
        *,
        status: int = 200,
        refusal: str = "",
    ) -> HttpResponseBase:
        context = {
            "seq": str(seq),
            "run_id": str(run.pk),
            "run_badge": badges.run(run),
            "run_url": self.url(request, "change", run.pk),
            "content_url": self.url(request, "content", run.pk, seq),
            "facts": _facts(content) if content else [],
            "guarded": content is not None and content.guarded,
            "may_reveal": request.user.has_perm(REVEAL),
            "refusal": refusal,
        }
        title = _("The content of row %d") % seq
        return self.render(
            request, run, title=title, status=status, template=self.content_template, **context
        )


def _view(admin: RunFiles) -> Any:
    """Return a view that can be given attributes, which a method cannot."""

    def content(request: HttpRequest, object_id: str, seq: int) -> HttpResponseBase:
        return admin.content_view(request, object_id, seq)

    return content


def _facts(content: Content) -> list[Fact]:
    stored = content.stored
    return [
        Fact(_("File"), format_html('<code class="ar-copy">{}</code>', visible(stored.name))),
        Fact(_("Storage"), visible(settings.PAYLOAD_STORAGE)),
        Fact(_("Size"), filesizeformat(stored.size), _("%d bytes") % stored.size),
        Fact(_("SHA-256"), format_html('<code class="ar-copy">{}</code>', visible(stored.sha256))),
    ]
