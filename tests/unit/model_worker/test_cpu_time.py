"""Processor time of the worker's threads, as Prometheus is told."""

from __future__ import annotations

import threading
import time

from prometheus_client import CollectorRegistry
from tests.system.stack import wait_until

from antiphon.model_worker.cpu_time import CpuTime

NAME = "antiphon_worker_cpu_seconds_total"
PARTS = ("bus", "kernels", "python", "sending")


def told(registry: CollectorRegistry) -> dict[str, float]:
    values = {part: registry.get_sample_value(NAME, {"part": part}) for part in PARTS}
    return {part: value for part, value in values.items() if value is not None}


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_each_thread_is_told_by_itself_and_only_while_it_lives() -> None:
    registry, batching = CollectorRegistry(), [0]
    registry.register(CpuTime(lambda: batching[0] or None, lambda: 0.05))
    assert told(registry).keys() == {"bus"}
    burnt, go = threading.Event(), threading.Event()

    def work() -> None:
        batching[0] = threading.get_native_id()
        burn(0.2)
        burnt.set()
        go.wait()

    thread = threading.Thread(target=work)
    before = told(registry)["bus"]
    thread.start()
    burnt.wait()
    parts = told(registry)
    go.set()
    thread.join()
    wait_until(lambda: told(registry).keys() == {"bus"}, 5, "the end of a thread")
    assert parts.keys() == set(PARTS)
    assert parts["sending"] == 0.05
    assert parts["kernels"] + parts["python"] >= 0.15
    assert parts["bus"] - before < 0.2
