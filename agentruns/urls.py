"""The URLs of the ready-made JSON API: `path("api/", include("agentruns.urls"))`, with docs at `api/docs`."""

from django.urls import path

from agentruns.api import build_api

urlpatterns = [path("", build_api().urls)]
