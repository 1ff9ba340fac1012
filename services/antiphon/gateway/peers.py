"""The other processes of a model: commands to them, and detection of dead gateways."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.service.tasks import gather
from antiphon.wire.base import Process, Role
from antiphon.wire.command import (
    AddCorpus,
    ContinueWorker,
    ControlDone,
    FlushCache,
    KernelChoice,
    ListCorpora,
    ListKernels,
    PauseWorker,
    RemoveCorpus,
    SetWeightVersion,
)
from antiphon.wire.errors import EngineError, Unavailable
from antiphon.wire.routes import ABORT, WORKER_CONTROL
from antiphon.wire.submit import AbortRequests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import InstanceId, ModelName, TenantId

    WorkerCommand = (
        FlushCache
        | PauseWorker
        | ContinueWorker
        | SetWeightVersion
        | AddCorpus
        | RemoveCorpus
        | ListCorpora
    )


SETTLE_S = 10.0
"""Grace period for a gateway that just started, or whose end is in flight."""
ANSWER_S = 15.0
"""Reply timeout; longer than a worker takes to finish a step."""
KERNELS_S = 1.0
"""Likewise, of what no step is waited for."""
_LOOK_S = 0.05
_ABORT_S = 5.0
"""Maximum age of an abort: later, the id may belong to another request."""


@dataclass(frozen=True)
class WorkerControl:
    """Commands go to every worker of the model, and are complete when all have applied them."""

    runtime: Runtime
    model: ModelName

    def loads(self) -> Iterator[tuple[Peer, WorkerLoad]]:
        """The last load report of each worker, in the order of their names."""
        peers = self.runtime.peers.with_role(Role.WORKER)
        for peer in sorted(peers, key=lambda peer: peer.process.instance):
            if peer.heartbeat.worker is not None and peer.heartbeat.model == self.model:
                yield peer, peer.heartbeat.worker

    def dp_rank(self, instance: InstanceId) -> int | None:
        names = [peer.process.instance for peer, _ in self.loads()]
        return names.index(instance) if instance in names else None

    async def flush(self, timeout_s: float) -> int | None:
        """Flush the prefix cache of every idle worker; return the number of freed pages.

        Each worker decides for itself whether it is idle, since its last load report may be
        outdated. Returns None if one was still busy after `timeout_s`; the others have flushed.
        """
        until = self.runtime.clock.now() + timeout_s
        pages = 0
        while True:
            done = await self.command(FlushCache(unless_busy=True))
            pages += sum(each.pages_freed for each in done)
            if not any(each.requests for each in done):
                return pages
            if self.runtime.clock.now() >= until:
                return None
            await asyncio.sleep(_LOOK_S)

    async def abort_elsewhere(
        self, prefix: str, *, tenant: TenantId | None = None, exact: bool = False
    ) -> None:
        """Ask the other gateways to abort the requests whose ids have this prefix, or equal it.

        With a `tenant`, only its requests.
        """
        message = AbortRequests(
            prefix=prefix,
            tenant=tenant,
            exact=exact,
            sender=self.runtime.process,
            not_after_unix_ms=self.runtime.clock.unix_ms() + round(_ABORT_S * 1000),
        )
        self.runtime.bus.publish(ABORT, message, model=self.model)

    async def kernels(self) -> dict[InstanceId, tuple[KernelChoice, ...]]:
        """The backend of each operation of the workers that report it within `KERNELS_S`."""

        async def ask(worker: InstanceId) -> tuple[KernelChoice, ...] | None:
            call = self.runtime.bus.call
            try:
                done = await call(WORKER_CONTROL, ListKernels(), timeout_s=KERNELS_S, worker=worker)
            except EngineError:
                return None
            return done.kernels

        workers = [
            peer.process.instance
            for peer, _ in self.loads()
            if ListKernels.__name__ in peer.heartbeat.reads
        ]
        reports = zip(workers, await gather([ask(worker) for worker in workers]), strict=True)
        return {worker: kernels for worker, kernels in reports if kernels is not None}

    async def command(
        self, order: WorkerCommand, *, timeout_s: float = ANSWER_S
    ) -> list[ControlDone]:
        """Send a command to every worker, and wait until all have applied it.

        Raises:
            EngineError: There is no worker, or one did not reply.
        """
        workers = [peer.process.instance for peer, _ in self.loads()]
        if not workers:
            raise Unavailable("no worker is available", retry_after_s=1.0)
        call = self.runtime.bus.call
        return await gather(
            [call(WORKER_CONTROL, order, timeout_s=timeout_s, worker=worker) for worker in workers]
        )


class GatewayLiveness:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_at = runtime.clock.now()

    def is_abandoned(self, owner: Process, deadline_unix_ms: int) -> bool:
        """Whether the owner of some work is dead, or its deadline has passed."""
        runtime = self._runtime
        due_ms = runtime.peers.to_local_ms(deadline_unix_ms, owner)
        if runtime.clock.unix_ms() > due_ms + round(SETTLE_S * 1000):
            return True
        if owner == runtime.process or runtime.peers.is_alive(owner):
            return False
        return runtime.clock.now() > self._began_at + SETTLE_S
