"""A running gateway, for the tests that need no settings of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.cluster import House, house

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as world:
        yield world
