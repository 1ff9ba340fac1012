"""Answers that are made whether or not anybody waits for them; a process that drains does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.service.tasks import isolated

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Detached:
    """Runs each in a task of the process."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Let it run by itself."""
        self._running += 1
        self._idle.clear()
        self._group.create_task(isolated(work)).add_done_callback(self._ended)

    async def idle(self) -> None:
        """Return when nothing runs. The caller bounds it."""
        await self._idle.wait()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
