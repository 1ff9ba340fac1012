"""Processor time of the worker by what it was spent on, for Prometheus."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CpuTime(Collector):
    """Reads the clocks of the worker's two threads when it is asked, and costs nothing between.

    `bus` is the thread that this is made in, which talks to the others: heartbeats, commands, and
    what else than tokens a step brings. `sending` is what the batching loop's spends on sending
    tokens by itself, `kernels` what threads that call kernels spend in them, and `python` the rest
    of the batching loop's: of one thread once the model is loaded, for then nobody else calls any.
    The other threads of torch's pool compute beside it, about as long each as `kernels`.
    """

    def __init__(self, batching: Callable[[], int | None], relayed_s: Callable[[], float]) -> None:
        """`batching` names the loop's thread; `relayed_s` is what it has spent on sending."""
        self._bus = threading.get_native_id()
        self._batching = batching
        self._relayed_s = relayed_s

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Tell seconds since start, of threads that live."""
        family = CounterMetricFamily(
            "antiphon_worker_cpu_seconds",
            "Processor time by part: bus; and of the batching thread kernels, python and sending.",
            labels=["part"],
        )
        relayed = self._relayed_s()
        bus, batching = _thread_s(self._bus), _thread_s(self._batching())
        if bus is not None:
            family.add_metric(["bus"], bus)
        if batching is not None:
            kernels = min(extension.kernel_cpu_s(), batching)
            family.add_metric(["kernels"], kernels)
            family.add_metric(["sending"], relayed)
            family.add_metric(["python"], max(0.0, batching - kernels - relayed))
        yield family


def _thread_s(thread: int | None) -> float | None:
    """A thread's processor time by Linux' own count; nothing of one that has ended, or elsewhere.

    Its clock could be asked as well, but of a thread that has just ended that is undefined.
    """
    try:
        told = Path(f"/proc/self/task/{thread}/schedstat").read_text()
    except OSError:
        return None
    return int(told.split()[0]) * 1e-9
