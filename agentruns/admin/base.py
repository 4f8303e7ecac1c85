"""Lists and pages of objects that only services may change, and the views that act on one object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import cache, cached_property, partial, wraps
from typing import Any, cast
from urllib.parse import urlencode
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

from django import forms
from django.conf import settings as django_settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import IntegerField, Model, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.formats import number_format
from django.utils.module_loading import import_string
from django.utils.text import capfirst
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django.views.decorators.debug import sensitive_post_parameters

from agentruns import journal
from agentruns.admin.html import plain
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, PermissionDeniedError
from agentruns.utils import clock

STYLES: dict[str, Sequence[str]] = {"all": ["agentruns/admin.css"]}
SCRIPTS = ["agentruns/console.js"]
# Views that act require POST, because Django requires no CSRF token with OPTIONS and TRACE either.
READING = ("GET", "HEAD")
CHANNEL = "console"  # of decisions made here, in the journal
ZONE = "agentruns_zone"  # the cookie
SINCE = "since"
MOST_NEWS = 100
TICKED = 100  # rows that one page can show and one person can check
MOST = 10_000  # rows that a list counts at most
_zones = cache(available_timezones)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A number of rows; `more` is True if there are more rows than `number`."""

    number: int
    more: bool = False

    def __str__(self) -> str:
        number = number_format(self.number, force_grouping=True)
        return f"{number}+" if self.more else number

    def __bool__(self) -> bool:
        return self.number > 0


def bounded(number: int, most: int) -> Bounded:
    """Limit a number to `most`; a larger number is displayed as `most` with a plus sign."""
    return Bounded(min(number, most), number > most)


def counted(rows: QuerySet[Any], most: int = MOST) -> Bounded:
    """Count rows, by one query that reads at most one row more than `most`."""
    # Select a constant instead of keys, so that only the index is read. Django would drop the constant of
    # `annotate(one=Value(1))` and select nothing.
    return bounded(rows.order_by().extra(select={"one": "1"}).values("one")[: most + 1].count(), most)


class CountOf(Subquery):
    """A subquery that counts the rows of another queryset, up to one more than `most`."""

    template = "(SELECT COUNT(*) FROM (%(subquery)s) AS counted)"

    def __init__(self, rows: QuerySet[Any], most: int = MOST) -> None:
        super().__init__(rows.order_by().values("pk")[: most + 1], output_field=IntegerField())


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts at most MOST rows. Later rows are on no page; use a filter or a search."""

    @cached_property
    def counted(self) -> Bounded:
        rows: Any = self.object_list
        return counted(rows)

    @cached_property
    def count(self) -> int:
        return self.counted.number


def ways(keys: Sequence[Any], key: Any, most: int, url: Callable[[Any], str]) -> dict[str, str]:
    """Build the context of ways.html: the URLs of the keys before and after `key`, and its place in `keys`.

    The place is a text such as "2 of 5". If `keys` has `most` keys or more, a plus sign follows the count. A
    URL is "" if there is no neighbour. If `key` is not in `keys`, the place is "", and the first key follows.
    """
    at = keys.index(key) if key in keys else -1
    text = _("%(place)d of %(count)s") % {"place": at + 1, "count": bounded(len(keys), most - 1)}
    return {
        "place": text if at >= 0 else "",
        "previous_url": url(keys[at - 1]) if at > 0 else "",
        "next_url": url(keys[at + 1]) if at + 1 < len(keys) else "",
    }


def following(keys: Sequence[Any], key: Any) -> list[Any]:
    """List the keys of a queue except `key`: first the keys after `key`, then the keys before it."""
    place = keys.index(key) if key in keys else 0
    return [each for each in [*keys[place:], *keys[:place]] if each != key]


def is_uuid(text: str) -> bool:
    """Check whether a text can be parsed as a UUID, which all ids are."""
    with suppress(ValueError):
        UUID(text)
        return True
    return False


def ticked(request: HttpRequest, rows: QuerySet[Any]) -> list[Any]:
    """Find the rows among `rows` that the user ticked, in the order of the page; at most TICKED rows."""
    texts = request.POST.getlist(ACTION_CHECKBOX_NAME)
    keys = list(dict.fromkeys(UUID(text) for text in texts if is_uuid(text)))
    objects = rows.in_bulk(keys[:TICKED]) if keys else {}
    return [objects[key] for key in keys if key in objects]


def first_id(moment: datetime) -> UUID:
    """Build the lowest id of a moment. An id begins with its time, so an index of ids finds rows by time."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)


class LeanChangeList(ChangeList):
    """A list that does not load the columns in `deferred`, whose size is unlimited."""

    deferred: tuple[str, ...] = ()

    def get_filters(self, request: HttpRequest) -> Any:
        """Find the filters. Raises IncorrectLookupParameters for a parameter that no filter knows."""
        parsed = super().get_filters(request)
        # Django would filter by any column, masked columns too: the list would reveal their values.
        if any(name.split("__")[0] != self.date_hierarchy for name in parsed[2]):
            raise IncorrectLookupParameters
        return parsed

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        return super().get_queryset(request, *args, **kwargs).defer(*self.deferred)

    @property
    def numbered(self) -> Any:
        """Copy the list for its page numbers; the copy counts "10,000+" rows if there are more than MOST."""
        numbered: Any = copy.copy(self)
        if self.paginator.counted.more:
            numbered.result_count = str(self.paginator.counted)
        return numbered

    def news_url(self) -> str:
        """Build the URL, with the list's filters, that an open list polls for the number of newer rows."""
        url = page_url(self.model_admin.admin_site, self.model, "news")
        return url + self.get_query_string({SINCE: str(first_id(clock.now(settings.DATABASE)))}, [PAGE_VAR])


@dataclass(frozen=True, slots=True)
class View:
    """A view of one object at `route` below the object's URL, or of no object, below the URL of the list.

    `function` is the path of a function in agentruns.admin, imported when it is called. It gets the admin,
    the request, the object, the other parts of the route, and `options`. Without a `route`, the route is
    `name`. A view that `acts` is called for POST only. Any other method redirects to the object's page, and
    an AgentRunsError shows that page with the error. `in_transaction` is False for a view that takes minutes,
    so that ATOMIC_REQUESTS opens no transaction for it. The user needs the permission to view the admin's
    objects, unless the view of no object is `for_others`: then it checks permissions itself.
    """

    name: str
    function: str
    route: str = ""
    options: dict[str, str] | None = None
    acts: bool = False
    in_transaction: bool = True
    for_others: bool = False

    def respond(self, model_admin: ReadOnlyAdmin, request: HttpRequest, **rest: Any) -> HttpResponseBase:
        """Find the object and call the function; raises PermissionDenied or Http404."""
        function: Callable[..., HttpResponseBase] = import_string(f"agentruns.admin.{self.function}")
        if "object_id" not in rest:
            if not self.for_others and not model_admin.has_view_permission(request):
                raise PermissionDenied
            return function(model_admin, request, **rest)
        obj = model_admin.find(request, rest.pop("object_id"))
        if not self.acts:
            return function(model_admin, request, obj, **rest)
        if request.method != "POST":
            return model_admin.back(request, obj)
        try:
            return function(model_admin, request, obj, **rest)
        except AgentRunsError as error:
            return model_admin.refused(request, obj, error)


def selected(verb: str, title: Any, view: str, only: Any, permissions: Sequence[str] | None = None) -> Any:
    """Build the list's action `verb`: `view` asks for confirmation, then acts on the ticked rows.

    After "select all" it acts only on the rows of the page, and the list shows the message `only`. It refuses
    more than TICKED rows. A user needs one of `permissions`, if they are given.
    """

    def act(model_admin: ReadOnlyAdmin, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        rows, sent = ticked(request, model_admin.get_queryset(request)), request.POST
        if len(set(sent.getlist(ACTION_CHECKBOX_NAME))) > TICKED:
            text = _("Choose at most %(most)d: nobody can check more on one page.") % {"most": TICKED}
            model_admin.message_user(request, text, messages.WARNING)
            return None
        if sent.get("select_across") == "1" and "confirmed" not in sent:
            model_admin.message_user(request, only % {"count": len(rows)}, messages.WARNING)
        answer: HttpResponse = import_string(f"agentruns.admin.{view}")(model_admin, request, verb, rows)
        return answer

    act.__name__ = f"{verb}_selected"
    return admin.action(act, permissions=permissions, description=title)


def zone_of(request: HttpRequest) -> tzinfo:
    """Choose the time zone of the user's browser, which a cookie names; without one, the current zone.

    Also the current zone if TIME_ZONE is set to another zone than UTC, or if the project activated a zone.
    """
    name, project = request.COOKIES.get(ZONE, ""), cast(Any, django_settings)
    is_chosen = timezone.get_current_timezone() != timezone.get_default_timezone()
    is_chosen |= project.is_overridden("TIME_ZONE") and project.TIME_ZONE != "UTC"
    return ZoneInfo(name) if name in _zones() and not is_chosen else timezone.get_current_timezone()


def _in_zone(view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Wrap a view so that its response, even one rendered later, shows times in the user's time zone.

    Notes on the request's user who acts in the user's name (`policy.identify`).
    Removes NUL characters from the URL's query, because lists repeat its values in their forms.
    """

    @wraps(view)
    def zoned(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            journal.policy.identify(request)
        except PermissionDeniedError as error:
            raise PermissionDenied(str(error)) from error
        if "%00" in (query := request.META["QUERY_STRING"]):
            request.GET = QueryDict(query.replace("%00", ""))
        in_zone = timezone.override(zone_of(request))
        response: Any = in_zone(view)(request, *args, **kwargs)
        if render := getattr(response, "render", None):
            response.render = in_zone(render)
        return response  # type: ignore[no-any-return]

    return zoned


def status_of(refusal: Exception) -> int:
    """Choose the HTTP status of a page that explains a refusal: 403 without permission, else 409."""
    return 403 if isinstance(refusal, PermissionDeniedError) else 409


def may_view(site: admin.AdminSite, request: HttpRequest, model: type[Model]) -> bool:
    """Check whether the admin site has a model and lets this user view the model's rows."""
    return site.is_registered(model) and site.get_model_admin(model).has_view_permission(request)


def page_url(
    site: admin.AdminSite, model: type[Model], page: str = "changelist", *args: object, **query: object
) -> str:
    """Build the URL of a model's page on an admin site, with `query` as parameters; raises NoReverseMatch."""
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
    url = reverse(name, args=args, current_app=site.name)
    return f"{url}?{urlencode(query)}" if query else url


def mask_for(run: Any) -> journal.masking.Mask:
    """Load the run's mask once and keep it on the run object, which lives for one request."""
    if not hasattr(run, "mask"):
        run.mask = journal.masking.mask_of(run)
    mask: journal.masking.Mask = run.mask
    return mask


class UnframedPage(TemplateResponse):
    """A page with buttons that no other page may frame, whatever headers middleware sets."""

    def items(self) -> Any:
        """Set the headers that forbid framing, and list all headers; servers call this after middleware."""
        policy, ours = self.headers.get("Content-Security-Policy", ""), "frame-ancestors 'none'"
        if not policy.endswith(ours):  # a second policy beside the project's own: browsers obey both
            self.headers["Content-Security-Policy"] = f"{policy}, {ours}" if policy else ours
        self.headers["X-Frame-Options"] = "DENY"
        return super().items()


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin that shows rows and lets services act; it adds, saves and deletes no rows."""

    actions: Sequence[Any] | None = None
    list_per_page = 50
    paginator = BoundedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    list_class: type[LeanChangeList] = LeanChangeList
    page_template = ""
    live_interval = 2000  # milliseconds between two looks of an open page
    views: Sequence[View] = ()
    pages: Sequence[View] = ()  # without an object
    nothing_chosen: Any = gettext_lazy("Nothing was done: choose from the list.")

    class Media:
        css = STYLES
        js = SCRIPTS

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse to add, change and delete rows, because only services write."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Choose the list class, which defers large columns."""
        return self.list_class

    def get_urls(self) -> list[URLPattern]:
        """Build the URLs of `pages`, of `views` and of Django's own pages."""
        patterns: list[URLPattern] = []
        about_none = [(view, "") for view in self.pages]
        for view, about in about_none + [(view, "<str:object_id>/") for view in self.views]:
            function: Any = partial(view.respond, self)
            function.__module__, _dot, function.__name__ = f"agentruns.admin.{view.function}".rpartition(".")
            function = sensitive_post_parameters("password")(function)  # keep it out of error reports
            if not view.in_transaction:
                function._non_atomic_requests = {*connections}
            route, asked = about + (view.route or f"{view.name}/"), self.admin_site.admin_view(function)
            name = f"{self.opts.app_label}_{self.opts.model_name}_{view.name}"
            patterns.append(path(route, asked, view.options, name=name))
        patterns += super().get_urls()
        for pattern in patterns:
            pattern.callback = _in_zone(pattern.callback)
        return patterns

    def listing(self, request: HttpRequest, query: QueryDict) -> Any:
        """Build the list for the URL parameters in `query`; raises IncorrectLookupParameters."""
        asked = copy.copy(request)
        asked.GET = query  # type: ignore[assignment]
        return self.get_changelist_instance(asked)

    @method_decorator(sensitive_post_parameters("password"))
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list of objects; refuse an action on a selection with a value that is no id."""
        if not all(map(is_uuid, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            self.message_user(request, str(self.nothing_chosen), messages.WARNING)
            return HttpResponseRedirect(request.get_full_path())
        context = {"title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
        return super().changelist_view(request, context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show the page of one object; raises the errors of `find`.

        Raises PermissionDenied for other methods than GET and HEAD, because the page saves nothing.
        """
        if request.method not in READING:
            raise PermissionDenied
        return self.page(request, self.find(request, object_id), **(extra_context or {}))

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Show Django's history of an object; raises PermissionDenied if the user may not view objects."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return super().history_view(request, object_id, extra_context)

    def page(self, request: HttpRequest, obj: Any, **context: Any) -> HttpResponse:
        """Render the page of one object; each subclass implements this method."""
        raise NotImplementedError

    def find(self, request: HttpRequest, object_id: object) -> Any:
        """Find an object; raises PermissionDenied or Http404."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        obj = self.get_object(request, unquote(str(object_id)))
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
        status: int = 200,
        template: str = "",
        **context: Any,
    ) -> UnframedPage:
        """Render an admin page by the console's template `template`, by default by `page_template`.

        `title` is plain text.
        """
        request.current_app = self.admin_site.name
        return UnframedPage(
            request,
            f"agentruns/admin/{template}.html" if template else self.page_template,
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "app_label": self.opts.app_label,
                "title": title,
                "original": title,
                "media": forms.Media(css=STYLES, js=SCRIPTS),
                "has_view_permission": True,
                "is_popup": False,
                "url_of": partial(self.url, request),
                "list_url": self.url(request, "changelist") if self.get_preserved_filters(request) else "",
                **context,
            },
            status=status,
        )

    def url(self, request: HttpRequest, action: str, *args: object, **query: object) -> str:
        """Build the URL of a page or action, keeping the filters of the list the user came from."""
        filters: Any = {"opts": self.opts, "preserved_filters": self.get_preserved_filters(request)}
        url = add_preserved_filters(filters, page_url(self.admin_site, self.model, action, *args))
        return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}" if query else url

    def back(self, request: HttpRequest, obj: Model, text: str = "") -> HttpResponseRedirect:
        """Redirect to the object's page, so that a reload repeats nothing; `text` is shown there."""
        if text:
            self.message_user(request, text, messages.INFO)
        return HttpResponseRedirect(self.url(request, "change", obj.pk))

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        """Log a message in the history, after the name of who acts in the name of the request's user."""
        actor = journal.events.actor_ref(request.user)
        named = f"{actor['name']}: {message}" if actor and "by" in actor else message
        return super().log_change(request, obj, named)

    def done(
        self, request: HttpRequest, obj: Model, logged: str, text: str, to: Model | None = None
    ) -> HttpResponseRedirect:
        """Log `logged` in the admin's history, show `text`, and redirect to the page of `to` or of `obj`."""
        self.log_change(request, obj, logged)
        self.message_user(request, text, messages.SUCCESS)
        return self.back(request, to or obj)

    def refused(self, request: HttpRequest, obj: Model, error: Exception) -> HttpResponse:
        """Show the object's present page, with the reason why nothing was changed."""
        text = _("Nothing was changed. %(why)s") % {"why": plain(error)}
        return self.page(request, self.find(request, obj.pk), status=status_of(error), refusal=text)

    def other_page(self, request: HttpRequest, model: type[Model], key: object) -> str:
        """Build the URL of another model's page; "" if there is no such page or the user may not view it."""
        with suppress(NoReverseMatch):
            if may_view(self.admin_site, request, model):
                return page_url(self.admin_site, model, "change", key)
        return ""


def news_view(model_admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Respond with a sentence that counts the list's rows newer than `since`, up to MOST_NEWS.

    The status is 204 if there are none, or if a parameter is invalid.
    """
    query = request.GET.copy()
    since = query.pop(SINCE, [""])[-1]
    try:
        new = counted(model_admin.listing(request, query).queryset.filter(pk__gt=UUID(since)), MOST_NEWS)
    except (ValueError, IncorrectLookupParameters):
        return HttpResponse(status=204)
    text = ngettext("%(count)s new since you opened this", "%(count)s new since you opened this", new.number)
    return HttpResponse(text % {"count": new}, "text/plain") if new else HttpResponse(status=204)
