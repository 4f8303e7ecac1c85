from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("agentruns.urls")),
    path("decide/", include("agentruns.admin.links")),
    path("slack/", include("agentruns.contrib.slack")),
]
