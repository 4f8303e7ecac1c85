from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

admin.site.site_url = None  # there is no other site to view

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("api/", include("agentruns.urls")),
]
