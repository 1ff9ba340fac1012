"""CPU time of the worker by part, for Prometheus."""

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
    """Reads the CPU time of the worker's two threads when it is scraped; free of cost otherwise.

    `bus` is the thread that creates this, which handles the bus: heartbeats, commands, and all
    results of steps but tokens. `sending` is the time that the batching loop's thread spends on
    sending tokens itself (`relayed_s`), `kernels` the time in kernels, and `python` the rest of the
    batching loop's thread, which alone calls kernels once the model is loaded. The other threads of
    torch's pool compute beside it, each about as long as `kernels`.
    """

    def __init__(self, batching: Callable[[], int | None], relayed_s: Callable[[], float]) -> None:
        self._bus = threading.get_native_id()
        self._batching = batching
        self._relayed_s = relayed_s

    def collect(self) -> Iterator[CounterMetricFamily]:
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
    """A thread's CPU time by Linux's schedstat; None if it has ended, or on other systems.

    Reading the thread's clock instead is undefined for a thread that has just ended.
    """
    try:
        schedstat = Path(f"/proc/self/task/{thread}/schedstat").read_text()
    except OSError:
        return None
    return int(schedstat.split()[0]) * 1e-9
