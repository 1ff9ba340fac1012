"""Ten minutes of random load with aborts leave nothing behind."""

from __future__ import annotations

import pytest
from tests.bench.soak import soak

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_nothing_is_held_and_no_memory_grows_under_load_with_aborts() -> None:
    result = soak(minutes=10.0)
    assert result.failures == []
    assert result.requests > 1000
    assert result.retractions > 0
