"""What operators tell a worker: drain, flush, pause, go on, another weight version, dump."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    DrainWorker,
    DumpPlans,
    FlushCache,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from antiphon.model_worker.batching.mailbox import ControlCommand, Mailbox
    from antiphon.model_worker.observability.plan_dumps import PlanDumps

COMMAND_TIMEOUT_S = 10.0

ControlMessage = (
    DrainWorker | FlushCache | PauseWorker | ContinueWorker | SetWeightVersion | DumpPlans
)


class ControlEndpoint:
    """Answers control calls. The loop obeys its orders in the order in which they were given."""

    def __init__(
        self,
        mailbox: Mailbox,
        dumps: PlanDumps,
        drain: Callable[[], None],
        live_count: Callable[[], int],
        send_heartbeat: Callable[[], Awaitable[None]],
    ) -> None:
        """Take orders.

        Args:
            mailbox: Of the loop that obeys most of them.
            dumps: Writes plans.
            drain: Begins to leave.
            live_count: Choices that go on, as those know it who read what they say.
            send_heartbeat: Sends a heartbeat now.
        """
        self._mailbox = mailbox
        self._dumps = dumps
        self._drain = drain
        self._live_count = live_count
        self._send_heartbeat = send_heartbeat
        self._waiting: deque[asyncio.Future[ControlDone]] = deque()

    async def answer(self, message: ControlMessage) -> ControlDone:
        """Do what is asked, and return when it has taken effect.

        Raises:
            DeadlineExceeded: No step ended for so long. The order stands, and is obeyed later.
            Overloaded: Too many orders wait.
            Unsupported: It is not set up for that.
        """
        match message:
            case DrainWorker():
                self._drain()
                return ControlDone()
            case DumpPlans():
                file = await asyncio.to_thread(self._dumps.write, "a command asked for it")
                return ControlDone(file=str(file))
            case FlushCache(unless_busy=True) if live := self._live_count():
                return ControlDone(requests=live)
            case FlushCache():
                return await self._submit(message)
            case _:
                done = await self._submit(message)
                # Whoever asks after the reply finds it in the heartbeat, at every gateway.
                await self._send_heartbeat()
                return done

    def complete(self, replies: Iterable[ControlDone]) -> None:
        """The loop has obeyed its next orders, with these results."""
        for reply in replies:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(reply)

    async def _submit(self, order: ControlCommand) -> ControlDone:
        self._mailbox.submit_command(order)
        obeyed: asyncio.Future[ControlDone] = asyncio.get_running_loop().create_future()
        self._waiting.append(obeyed)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return await obeyed
        except TimeoutError:
            raise DeadlineExceeded(f"no step ended in {COMMAND_TIMEOUT_S:g} s") from None
