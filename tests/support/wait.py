"""Waits for a condition instead of a fixed time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_AGAIN_S = 0.002


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return once `condition` holds; for conditions without an event to await.

    Raises:
        TimeoutError: It did not hold within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the condition has no event
            await asyncio.sleep(_LOOK_AGAIN_S)
