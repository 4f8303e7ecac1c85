"""The page of the API's documentation: nothing of it comes from elsewhere, with and without ninja's files."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib.staticfiles import finders
from django.templatetags.static import static

from tests.api.http import Api

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("installed", [False, True])
def test_all_that_the_page_loads_is_here(settings: Any, installed: bool) -> None:
    if installed:
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ninja"]
    api = Api()
    page = api.client.get("/api/docs").content.decode()
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert loaded and not any("//" in each for each in loaded)
    for url in loaded:
        if url.startswith(static("")):
            assert finders.find(url.removeprefix(static(""))), url
        else:
            assert api.client.get(urljoin("/api/docs", url)).json()["openapi"] == "3.1.0"
    # Under a strict policy a script is a file.
    scripts = re.findall(r"<script([^>]*)>([^<]*)", page)
    assert all('type="application/json"' in about or not text.strip() for about, text in scripts)
    assert (len(scripts) > 1) is installed
    assert ("INSTALLED_APPS" in page) is not installed
    assert "style=" not in page and "<style" not in page
