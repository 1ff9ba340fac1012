"""What operators tell the workers of a model, and its other doors, through one of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.gateway.gather import gather
from antiphon.wire.abort import AbortRequests
from antiphon.wire.base import Role
from antiphon.wire.command import FlushCache
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import ABORT, WORKER_CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.command import (
        ContinueWorker,
        ControlDone,
        PauseWorker,
        SetWeightVersion,
    )
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import InstanceId, ModelName, TenantId

    WorkerCommand = FlushCache | PauseWorker | ContinueWorker | SetWeightVersion

_ANSWER_S = 15.0
"""Longer than a worker waits for its step to end."""
_LOOK_S = 0.05
_ABORT_S = 5.0
"""How late an abort may come: later, a name may be another request's."""


class WorkerControl:
    """Orders go to every worker of the model, and are done when all have obeyed."""

    def __init__(self, runtime: Runtime, model: ModelName) -> None:
        self._runtime = runtime
        self._model = model

    def loads(self) -> Iterator[tuple[Peer, WorkerLoad]]:
        """What each has last said of itself, in the order of their names."""
        peers = self._runtime.peers.with_role(Role.WORKER)
        for peer in sorted(peers, key=lambda peer: peer.process.instance):
            if peer.heartbeat.worker is not None and peer.heartbeat.model == self._model:
                yield peer, peer.heartbeat.worker

    def dp_rank(self, instance: InstanceId) -> int | None:
        """The place of a worker among them, if it is there."""
        names = [peer.process.instance for peer, _ in self.loads()]
        return names.index(instance) if instance in names else None

    async def flush(self, timeout_s: float) -> int | None:
        """Drop the prefix cache of every worker that has no request; say how many pages that was.

        Each worker decides for itself: what it has said of its load is older than that.

        Args:
            timeout_s: How long to wait for those that have requests.

        Returns:
            Nothing if one was still busy then; the others have obeyed.

        Raises:
            EngineError: There is none, or one did not answer.
        """
        until = self._runtime.clock.now() + timeout_s
        pages = 0
        while True:
            done = await self.command(FlushCache(unless_busy=True))
            pages += sum(each.pages_freed for each in done)
            if not any(each.requests for each in done):
                return pages
            if self._runtime.clock.now() >= until:
                return None
            await asyncio.sleep(_LOOK_S)

    async def abort_elsewhere(
        self, prefix: str, *, tenant: TenantId | None = None, exact: bool = False
    ) -> None:
        """Tell the other gateways to end the requests whose names begin so, or are so.

        With a `tenant` only its own.

        Raises:
            EngineError: The broker is away.
        """
        message = AbortRequests(
            prefix=prefix,
            tenant=tenant,
            exact=exact,
            sender=self._runtime.process,
            not_after_unix_ms=self._runtime.clock.unix_ms() + round(_ABORT_S * 1000),
        )
        self._runtime.bus.publish(ABORT, message, model=self._model)

    async def command(self, order: WorkerCommand) -> list[ControlDone]:
        """Tell every worker, and wait until all have obeyed.

        Raises:
            EngineError: There is none, or one did not answer.
        """
        workers = [peer.process.instance for peer, _ in self.loads()]
        if not workers:
            raise Unavailable("no worker is there", retry_after_s=1.0)
        call = self._runtime.bus.call
        return await gather(
            [call(WORKER_CONTROL, order, timeout_s=_ANSWER_S, worker=worker) for worker in workers]
        )
