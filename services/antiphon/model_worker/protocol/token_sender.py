"""Sends tokens to the detokenizers, from both threads of the worker."""

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
"""Detokenizers whose publishers are cached."""


class TokenSender:
    """Sends the messages of `WorkerOutput`, in the order of their numbers.

    Most steps only sample a token for each choice. Passing these through the event loop costs a
    wake-up, a turn of it, and a thread that competes with the kernels: about as much as all the
    rest of a step. So `relay` sends them from the batching loop's thread.

    Attributes:
        lock: Held by every caller that changes `WorkerOutput`. The event loop waits for it, about
            as long as sending a message takes; the batching loop does not.
        relayed_s: CPU time of `relay`, since start.
    """

    def __init__(self, bus: Bus, output: WorkerOutput) -> None:
        self.lock = threading.RLock()
        self.relayed_s = 0.0
        self._bus = bus
        self._output = output
        self._outlet = lru_cache(OUTLETS_MAX)(self._open_outlet)

    def publish(self) -> None:
        """Send all unsent messages, if the bus is connected."""
        with self.lock:
            if self._output.has_unsent and self._bus.link.up:
                self._publish()

    def relay(self, report: StepReport) -> bool:
        """Process and send the tokens of a decode step, in the batching loop's thread.

        The caller holds the lock, and all reports before this one have been processed. False: it is
        not possible now, and nothing was done.
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
                # Its number is used, so the detokenizer notices the gap, at the latest by our next
                # heartbeat, and requests the missing tokens.
                fields = {"detokenizer": detokenizer, "error": error}
                log.warning("tokens not sent", extra=fields)
            except Exception:
                # The messages after it are for other detokenizers; the missing one is requested.
                log.exception("tokens not sent", extra={"detokenizer": detokenizer})

    def _open_outlet(self, detokenizer: InstanceId) -> Callable[[TokenNews], None]:
        return self._bus.publisher(TOKENS, detokenizer=detokenizer)
