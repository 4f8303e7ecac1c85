"""The admin of what only services may change: lists, pages of its own, and no form that saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _

from agentruns.admin.paginator import BoundedPaginator
from agentruns.admin.text import plain, short_id
from agentruns.conf import settings

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = admin.ModelAdmin

STYLES: dict[str, Sequence[str]] = {"all": ["agentruns/admin.css"]}
SCRIPTS = ["agentruns/console.js"]
# Whatever acts asks for POST by name: of OPTIONS and TRACE, too, Django wants no CSRF token.
READING = ("GET", "HEAD")


def may_view(site: admin.AdminSite, request: HttpRequest, model: type[Model]) -> bool:
    """Whether a site shows a model, and to this user."""
    return site.is_registered(model) and site.get_model_admin(model).has_view_permission(request)


class LeanChangeList(ChangeList):
    """A list that leaves the columns of unbounded size in the database."""

    deferred: tuple[str, ...] = ()

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows without the deferred columns."""
        return super().get_queryset(request, *args, **kwargs).defer(*self.deferred)

    @property
    def shown(self) -> Any:
        """The list as its page numbers show it: what was not counted to the end says so."""
        counted = self.paginator.counted
        return _Shown(self, str(counted)) if counted.more else self


class _Shown:
    """A list with a text for its size; else as it is."""

    def __init__(self, shown: LeanChangeList, count: str) -> None:
        self._shown = shown
        self.result_count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


class ReadOnlyAdmin(Base):
    """Shows, and lets services act. Nothing here adds, saves or deletes a row."""

    actions: Sequence[str] | None = None
    list_per_page = 50
    paginator = BoundedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    list_class: type[LeanChangeList] = LeanChangeList
    page_template = ""

    class Media:
        css = STYLES
        js = SCRIPTS

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: only services write."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: only services write."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: the journal is kept."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of the database the journal lives in."""
        return super().get_queryset(request).using(settings.DATABASE)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that defers large columns."""
        return self.list_class

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show the page of one object; there is nothing to save on it."""
        if request.method not in READING:
            raise PermissionDenied
        return self.page(request, self.find(request, object_id), **(extra_context or {}))

    def page(self, request: HttpRequest, obj: Any, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one object."""
        raise NotImplementedError

    def find(self, request: HttpRequest, object_id: str) -> Any:
        """Return the object, or refuse: not allowed, not there."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        obj = self.get_object(request, unquote(object_id))
        if obj is None:
            name = self.opts.verbose_name
            raise Http404(_("There is no %(name)s %(id)s.") % {"name": name, "id": plain(object_id)})
        return obj

    def render(
        self,
        request: HttpRequest,
        obj: Model | None,
        *,
        title: str,
        status: int,
        template: str = "",
        **context: Any,
    ) -> TemplateResponse:
        """Render `template`, else `page_template`, with what an admin page needs; `title` is plain text."""
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            template or self.page_template,
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "app_label": self.opts.app_label,
                "title": title,
                "original": short_id(obj.pk) if obj else title,
                "media": forms.Media(css=STYLES, js=SCRIPTS),
                "has_view_permission": True,
                "is_popup": False,
                "list_url": self.url(request, "changelist") if self.get_preserved_filters(request) else "",
                **context,
            },
            status=status,
        )

    def name(self, action: str) -> str:
        """Return the name of one of this admin's URLs."""
        return f"{self.opts.app_label}_{self.opts.model_name}_{action}"

    def url(self, request: HttpRequest, action: str, *args: object, **query: object) -> str:
        """Return the URL of a page or action, keeping the filters of the list the user came from."""
        url = reverse(f"admin:{self.name(action)}", args=args, current_app=self.admin_site.name)
        filters: Any = {"opts": self.opts, "preserved_filters": self.get_preserved_filters(request)}
        url = add_preserved_filters(filters, url)
        return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}" if query else url

    def back(self, request: HttpRequest, obj: Model) -> HttpResponseRedirect:
        """Return to the object's page, so that a reload repeats nothing."""
        return HttpResponseRedirect(self.url(request, "change", obj.pk))

    def other_page(self, request: HttpRequest, model: type[Model], key: object) -> str:
        """Return the URL of another model's page, or "" where this site or this user has none."""
        if not may_view(self.admin_site, request, model):
            return ""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        try:
            return reverse(name, args=[key], current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""
