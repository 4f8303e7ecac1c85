"""The JSON API ready-made: `path("api/", include("agentruns.urls"))`; its docs are at `api/docs`."""

from django.urls import path

from agentruns.api import build_api

urlpatterns = [path("", build_api().urls)]
