"""Lets a host project's transactional tests empty the database, journal included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _agentruns_flush() -> Iterator[None]:
    """Lift the journal's triggers for the flush after a TransactionTestCase, and put them back."""
    from django.conf import settings

    if not settings.configured:
        yield
        return
    from django.test import TransactionTestCase

    from agentruns.testing.flush import flush_with_triggers_lifted

    original = TransactionTestCase._fixture_teardown  # type: ignore[attr-defined]

    def teardown(self: Any) -> None:
        flush_with_triggers_lifted(self, original)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", teardown)
        yield
