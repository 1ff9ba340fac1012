"""Concurrent work: calls, actions, and a task group that can end its tasks before its block."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from antiphon.bus.transport import BusDown
from antiphon.service.inbox import SharedStateBroken
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
    from contextvars import Context

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


async def isolated(
    work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Run `work` for one request or message; its errors are logged and do not cancel the group."""
    # It is called when the task starts: a task cancelled before leaves no un-awaited coroutine.
    try:
        await work(*args, **kwargs)
    except SharedStateBroken:
        raise
    except Exception:
        log.exception("task failed", extra={"work": work.__qualname__})


def perform(actions: Iterable[T], act: Callable[[T], None]) -> None:
    """Do each action of a state machine; one that fails does not affect those after it.

    They are of other requests or for other receivers. A message that is not sent while the link is
    down is sent again from state.
    """
    for action in actions:
        try:
            act(action)
        except BusDown:
            continue
        except RequestTooLarge:
            log.exception("message too large", extra={"action": type(action).__name__})
        except Exception:
            log.exception("action failed", extra={"action": type(action).__name__})


async def repeat(work: Callable[[], None], every_s: float) -> None:
    """Run `work` periodically until cancelled; its errors are logged and do not end the loop."""
    while True:
        await asyncio.sleep(every_s)
        try:
            work()
        except Exception:
            log.exception("tick failed", extra={"work": work.__qualname__})


async def gather(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Return all results in order, or raise the first error and cancel the other calls."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Tasks(asyncio.TaskGroup):
    """Background tasks or running calls: awaited or cancelled before the resources they use."""

    def __init__(self) -> None:
        super().__init__()
        self._live: set[asyncio.Task[Any]] = set()

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        return task

    def __len__(self) -> int:
        return len(self._live)

    async def ended(self) -> None:
        """Return when no task is left, including later ones. The caller bounds the wait."""
        while self._live:
            await asyncio.wait(self._live)

    async def cancel(self, timeout_s: float) -> None:
        for task in self._live:
            task.cancel()
        if self._live:
            _, stuck = await asyncio.wait(self._live, timeout=timeout_s)
            if stuck:
                names = [task.get_name() for task in stuck]
                log.error("tasks ignore cancellation", extra={"tasks": names})
