"""The way of tokens to the detokenizers, from both threads of the worker."""

from __future__ import annotations

import logging
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING

from antiphon.wire.errors import EngineError
from antiphon.wire.routes import TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.bus.bus import Bus
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.protocol.worker_output import WorkerOutput
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.tokens import TokenNews

log = logging.getLogger(__name__)

OUTLETS_MAX = 64
"""Detokenizers whose subjects are kept."""


class TokenSender:
    """Sends what the output machine has, in the order of its numbers.

    Most steps draw a token for each choice and do nothing else. To have the event loop take that in
    and send it costs a wake-up, a turn of it and a thread that runs where kernels would: about as
    much as all the rest of a step. So `relay` sends it where it was drawn.

    Attributes:
        lock: Of the output machine: whoever calls what changes it holds this. The event loop waits
            for it, about as long as a message is sent; the batching loop does not.
        relayed_s: Processor time that `relay` took, since start.
    """

    def __init__(self, bus: Bus, output: WorkerOutput) -> None:
        self.lock = threading.RLock()
        self.relayed_s = 0.0
        self._bus = bus
        self._output = output
        self._outlet = lru_cache(OUTLETS_MAX)(self._open_outlet)

    def publish(self) -> None:
        """Send all that is unsent, if there is a link."""
        with self.lock:
            if self._output.has_unsent and self._bus.link.up:
                self._publish()

    def relay(self, report: StepReport) -> bool:
        """Take in and send the tokens of a steady step, in the thread that drew them.

        The caller holds the lock, and all reports before this one have been taken in. False: it is
        not to be had now, and nothing was done.
        """
        if not (self._bus.link.up and self._bus.transport.any_thread):
            return False
        began = time.thread_time()
        self._output.step(report.step, report.progress, relays=True)
        self._publish()
        self.relayed_s += time.thread_time() - began
        return True

    def _publish(self) -> None:
        for detokenizer, batch in self._output.take():
            try:
                self._outlet(detokenizer)(batch)
            except EngineError as error:
                # Its number is used up, so the detokenizer sees the gap, at the latest by our
                # next heartbeat, and asks for what it lacks.
                fields = {"detokenizer": detokenizer, "error": error}
                log.warning("tokens not sent", extra=fields)
            except Exception:
                # The messages after it are for others; what it lacked is asked for as well.
                log.exception("tokens not sent", extra={"detokenizer": detokenizer})

    def _open_outlet(self, detokenizer: InstanceId) -> Callable[[TokenNews], None]:
        return self._bus.publisher(TOKENS, detokenizer=detokenizer)
