"""Control calls to a worker.

Drain, flush, pause, continue, weight version, dump, corpora, kernels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.mailbox import ControlCommand, Mailbox
from antiphon.model_worker.speculation.corpora import CorpusCommand, ExternalCorpora
from antiphon.wire.command import (
    AddCorpus,
    ControlDone,
    DrainWorker,
    DumpPlans,
    FlushCache,
    KernelChoice,
    ListCorpora,
    ListKernels,
    RemoveCorpus,
)
from antiphon.wire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from antiphon.model_worker.observability.recording import PlanDumps

COMMAND_TIMEOUT_S = 10.0

ControlMessage = DrainWorker | ControlCommand | DumpPlans | CorpusCommand | ListKernels


@dataclass
class ControlEndpoint:
    """Answers control calls. The loop applies its commands in the order in which they arrived.

    `drain` is called with whether running requests are handed back, too. `live_count` is the number
    of running choices, by what was sent of them.
    """

    mailbox: Mailbox
    dumps: PlanDumps
    corpora: ExternalCorpora
    drain: Callable[[bool], None]
    live_count: Callable[[], int]
    send_heartbeat: Callable[[], Awaitable[None]]
    kernels: tuple[KernelChoice, ...]
    _waiting: deque[asyncio.Future[ControlDone]] = field(
        default_factory=deque["asyncio.Future[ControlDone]"]
    )

    async def answer(self, message: ControlMessage) -> ControlDone:
        """Apply a command, and return when it has taken effect.

        Raises:
            DeadlineExceeded: No step ended for so long. The command is still applied later.
            Overloaded: Too many commands are pending, or another corpus is being added.
            InvalidRequest: A corpus cannot be added.
            Unsupported: The worker is not configured for it.
        """
        match message:
            case DrainWorker(migrate=migrate):
                self.drain(migrate)
                await self.send_heartbeat()
                return ControlDone()
            case DumpPlans():
                file = await asyncio.to_thread(self.dumps.write, "requested by a command")
                return ControlDone(file=str(file))
            case AddCorpus() | RemoveCorpus() | ListCorpora():
                return await self.corpora.answer(message)
            case ListKernels():
                return ControlDone(kernels=self.kernels)
            case FlushCache(unless_busy=True) if live := self.live_count():
                return ControlDone(requests=live)
            case FlushCache():
                return await self._submit(message)
            case _:
                done = await self._submit(message)
                # After the reply every gateway has the new state by the heartbeat.
                await self.send_heartbeat()
                return done

    def complete(self, replies: Iterable[ControlDone]) -> None:
        for reply in replies:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(reply)

    async def _submit(self, command: ControlCommand) -> ControlDone:
        self.mailbox.submit_command(command)
        applied: asyncio.Future[ControlDone] = asyncio.get_running_loop().create_future()
        self._waiting.append(applied)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return await applied
        except TimeoutError:
            raise DeadlineExceeded(f"no step ended in {COMMAND_TIMEOUT_S:g} s") from None
