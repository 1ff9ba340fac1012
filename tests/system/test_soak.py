"""Ten minutes of random load with aborts leave nothing behind."""

from __future__ import annotations

import pytest
from tests.bench.soak import soak

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_nothing_is_held_and_no_memory_grows_under_load_with_aborts() -> None:
    summary = soak(minutes=10.0)
    assert summary.notes == ()
    assert int(summary.setup["requests"]) > 1000
    assert int(summary.setup["retractions"]) > 0
