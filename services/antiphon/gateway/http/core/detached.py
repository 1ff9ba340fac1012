"""Requests that continue without a client; a draining process waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec

from antiphon.service.tasks import isolated

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")


class DetachedTasks:
    """Runs each in a task of the process."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(
        self, work: Callable[P, Coroutine[None, None, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self._running += 1
        self._idle.clear()
        self._group.create_task(isolated(work, *args, **kwargs)).add_done_callback(self._ended)

    async def idle(self) -> None:
        """Return when no task is running. The caller sets the deadline."""
        await self._idle.wait()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
