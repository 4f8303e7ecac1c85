"""The time of steps and waits on the page of a run."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import override_settings

from agentruns import approve
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.admin.pages import url
from tests.admin.people import browser, user
from tests.admin.world import World

pytestmark = pytest.mark.django_db


def gaps_and_times(run: Run, query: str = "") -> tuple[list[str], list[str]]:
    with override_settings(USE_THOUSAND_SEPARATOR=True):
        html = browser("viewer").get(url(run) + query).content.decode()
    assert not re.search(r'style="', html)
    return re.findall(r'class="ar-gap">([^<]*)<', html), re.findall(r"</svg>([^<]*)</span>", html)


def test_an_approved_call_from_the_task_to_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    approval = world.waiting()
    monkeypatch.setattr("agentruns.admin.runs.timing.NOTICED", timedelta(microseconds=1))
    assert [len(found) for found in gaps_and_times(approval.run)] == [0, 1]
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    gaps, times = gaps_and_times(approval.run)
    assert [gap for gap in gaps if gap.endswith("for an approval")]
    assert len(times) == 3  # two requests and one tool
    decided = approval.run.messages.get(kind="approval_decided").seq
    assert (
        gaps_and_times(approval.run, f"?after={decided - 1}")[0] == gaps
    )  # though it began on an earlier page
