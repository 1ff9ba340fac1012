"""One stack for all tests that leave it as they found it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with serving() as running:
        yield running
