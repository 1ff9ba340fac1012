"""Sends what a step did: tokens to the detokenizers, and its report to the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
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
    from antiphon.wire.tokens import TokenBatch

log = logging.getLogger(__name__)

OUTLETS_MAX = 64
"""Detokenizers whose publishers are cached."""
REPORTS_MAX = 64
"""Reports that may be queued before the batching loop waits."""


class TokenSender:
    """Sends the messages of `WorkerOutput`, in the order of their numbers.

    Tokens are sent in the batching loop's thread. To pass them through the event loop costs a
    wake-up, a turn of it, and a thread that competes with the kernels: about as much as all the
    rest of a step.

    Attributes:
        lock: Held by every caller that changes `WorkerOutput`, for about as long as it takes to
            send a message.
        sending_s: CPU time of `take_in`, since start.
    """

    def __init__(self, bus: Bus, output: WorkerOutput, *, wait_s: float) -> None:
        self.lock = threading.RLock()
        self.sending_s = 0.0
        self._bus = bus
        self._output = output
        self._wait_s = wait_s
        self._outlet = lru_cache(OUTLETS_MAX)(self._open_outlet)

    def publish(self) -> None:
        """Send all unsent messages, if the bus is connected."""
        with self.lock:
            if self._output.has_unsent and self._bus.link.up:
                self._publish()

    def take_in(self, report: StepReport) -> bool:
        """Take in what a step did and send it, in the batching loop's thread.

        Returns whether the event loop has to go on with it: a choice has ended or failed, or only
        the event loop may publish.

        Raises:
            TimeoutError: The event loop has held the lock for `wait_s`. It hangs, and heartbeats
                with it, so peers have considered the process dead long before: it has to end.
        """
        began = time.thread_time()
        if not self.lock.acquire(timeout=self._wait_s):
            raise TimeoutError(f"the event loop has held the outputs for {self._wait_s:g} s")
        try:
            return self._take_in(report)
        except Exception:
            # It may be half taken in, so it is not taken in again: its requests end.
            log.exception("report failed", extra={"step": report.step})
            self._output.fail_step(report.progress)
            return True
        finally:
            self.lock.release()
            self.sending_s += time.thread_time() - began

    def _take_in(self, report: StepReport) -> bool:
        output, link_up = self._output, self._bus.link.up
        if report.started:
            output.started(report.started)
        ended = output.step(report.step, report.progress, link_up=link_up)
        if link_up and self._bus.transport.any_thread:
            self._publish()
        return ended or output.has_actions or (link_up and output.has_unsent)

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

    def _open_outlet(self, detokenizer: InstanceId) -> Callable[[TokenBatch], None]:
        return self._bus.publisher(TOKENS, detokenizer=detokenizer)


@dataclass(kw_only=True)
class ReportQueue:
    """A bounded queue between two threads.

    `take` processes each report in the event loop's thread; `failed` ends with its exception. The
    batching loop waits at most `wait_s` for an event loop that is far behind.
    """

    take: Callable[[StepReport], None]
    wait_s: float

    def __post_init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._free = threading.Semaphore(REPORTS_MAX)
        self.failed: asyncio.Future[None] = self._event_loop.create_future()

    def put(self, report: StepReport) -> None:
        """Queue a report, in the batching loop's thread; wait if the event loop is far behind.

        A `TimeoutError` ends the process, so that its supervisor starts another: the event loop
        hangs, and heartbeats with it, so that peers have considered it dead long before.
        """
        if not self._free.acquire(timeout=self.wait_s):
            raise TimeoutError(
                f"the event loop processed none of {REPORTS_MAX} step reports in {self.wait_s:g} s"
            )
        self._event_loop.call_soon_threadsafe(self._turn, report)

    def _turn(self, report: StepReport) -> None:
        self._free.release()
        try:
            self.take(report)
        except Exception as error:  # noqa: BLE001  # raised where `failed` is awaited
            if not self.failed.done():
                self.failed.set_exception(error)
