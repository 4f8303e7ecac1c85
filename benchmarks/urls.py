"""The admin and an API made with ninja, as a project has them without agentruns; and with it, its own."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from ninja import NinjaAPI

api = NinjaAPI(urls_namespace="host")


@api.get("/hello")
def hello(request: object, name: str) -> str:
    """Greet."""
    return f"Hello, {name}."


urlpatterns = [path("admin/", admin.site.urls), path("api/", api.urls)]
if not settings.IS_PLAIN:
    urlpatterns.append(path("agentruns/", include("agentruns.urls")))
