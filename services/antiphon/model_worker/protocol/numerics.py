"""Workers of one model give the same bits, where one of them has promised any."""

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
    """Compares our bits with those of the other workers.

    A request may go on at another worker, or come again and meet one: with other bits its answer
    would be another. Who comes later gives way; of two that come at once, one of them.

    Attributes:
        bits: As in our load report; empty if we have promised nothing.
    """

    def __init__(self, process: Process, model: ModelName, digest: str) -> None:
        """Nobody was met yet."""
        self.digest = digest
        self._process = process
        self._model = model
        self._conflict: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def compare(self, beat: Heartbeat, state: ProcessState) -> None:
        """Compare with another worker, in the state that we are in."""
        if beat.worker is None or beat.state is ProcessState.DRAINING or beat.model != self._model:
            return
        if beat.worker.bits == self.digest or self._conflict.done():
            return
        if state is ProcessState.STARTING or beat.process.incarnation < self._process.incarnation:
            fields = ", ".join(self._differing(beat.worker.bits))
            message = f"{beat.process.instance} computes this model with other numerics: {fields}"
            self._conflict.set_result(message)

    async def wait_for_conflict(self) -> None:
        """Wait until somebody was met to whom we give way.

        Raises:
            CannotStart: It names the worker, and in what we differ.
        """
        raise CannotStart(await self._conflict)

    def _differing(self, theirs: str) -> tuple[str, ...]:
        if not theirs or not self.digest:
            return ("model.deterministic",)
        return differing(self.digest, theirs)
