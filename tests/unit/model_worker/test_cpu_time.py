"""Processor time of the worker's threads, as Prometheus is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from prometheus_client import CollectorRegistry
from tests.system.stack import wait_until

from antiphon.kernels.cpu import extension
from antiphon.model_worker.observability.metrics import CpuTime

NAME = "antiphon_worker_cpu_seconds_total"
PARTS = ("bus", "kernels", "python", "sending")


def told(registry: CollectorRegistry) -> dict[str, float]:
    values = {part: registry.get_sample_value(NAME, {"part": part}) for part in PARTS}
    return {part: value for part, value in values.items() if value is not None}


def burn(seconds: float) -> float:
    """Return a little more than `seconds`: what this thread has used so far."""
    while (used := time.thread_time()) < seconds:
        pass
    return used


def test_each_thread_is_told_by_itself_and_only_while_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "kernel_cpu_s", lambda: 0.02)
    registry, batching = CollectorRegistry(), [0]
    registry.register(CpuTime(lambda: batching[0] or None, lambda: 0.15))
    assert told(registry).keys() == {"bus"}
    burnt: Future[float] = Future()
    go = threading.Event()

    def work() -> None:
        batching[0] = threading.get_native_id()
        burnt.set_result(burn(0.3))
        go.wait()

    thread = threading.Thread(target=work)
    thread.start()
    used = burnt.result()
    before = time.thread_time()
    parts = told(registry)
    after = time.thread_time()
    go.set()
    thread.join()
    wait_until(lambda: told(registry).keys() == {"bus"}, 5, "the end of a thread")
    assert parts.keys() == set(PARTS)
    assert (parts["kernels"], parts["sending"]) == (0.02, 0.15)
    assert parts["python"] == pytest.approx(used - 0.02 - 0.15, abs=0.01)
    assert before - 0.01 <= parts["bus"] <= after + 0.01
