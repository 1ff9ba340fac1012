"""Checks that all workers of a model have the same numerics if inference is deterministic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.config.digest import differing
from antiphon.service.sockets import CannotStart
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from antiphon.wire.base import Process
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import ModelName


class NumericsCheck:
    """Compares this worker's numerics with those of the other workers.

    A request may continue on another worker, or be repeated there: with other numerics its output
    would differ. The later worker ends; of two that start at once, one of them.

    Attributes:
        digest: Numerics digest, as in the load report; empty if inference is not deterministic.
    """

    def __init__(self, process: Process, model: ModelName, digest: str) -> None:
        self.digest = digest
        self._process = process
        self._model = model
        self._conflict: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def compare(self, beat: Heartbeat, state: ProcessState) -> None:
        """Compare with another worker's heartbeat; `state` is the state of this process."""
        if beat.worker is None or beat.state is ProcessState.DRAINING or beat.model != self._model:
            return
        if beat.worker.bits == self.digest or self._conflict.done():
            return
        if state is ProcessState.STARTING or beat.process.incarnation < self._process.incarnation:
            fields = ", ".join(self._differing(beat.worker.bits))
            message = f"{beat.process.instance} computes this model with other numerics: {fields}"
            self._conflict.set_result(message)

    async def wait_for_conflict(self) -> None:
        """Wait until another worker differs and this one has to end.

        Raises:
            CannotStart: Names the other worker and the differences.
        """
        raise CannotStart(await self._conflict)

    def _differing(self, theirs: str) -> tuple[str, ...]:
        if not theirs or not self.digest:
            return ("model.deterministic",)
        return differing(self.digest, theirs)
