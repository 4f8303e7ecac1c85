"""Every interleaving of two drivers, people, the clock and the sweep, with crashes: no promise is broken."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.scenarios import SCENARIOS, scenario
from tests.settings import BRIEF


# In `make test` 220,000 states, 580,000 transitions and 33 steps of depth altogether: 11 s of one core.
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_breaks_a_promise(name: str) -> None:
    found = explore(scenario(name, long=not BRIEF))
    print(found)
    assert not found.wrong, found.told()
    assert found.is_complete
