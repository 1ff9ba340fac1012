"""Dropped messages are counted, and logged once a second."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.bus.discovery import EndpointCounters
from antiphon.service.inbox import DroppedMessages, RouteMetrics
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import MalformedMessage

if TYPE_CHECKING:
    import pytest


def test_refusals_count_each_message_and_log_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    metrics, now = Metrics(), [0.0]
    counts = RouteMetrics(metrics, EndpointCounters(name="worker.stop", subject="s"))
    refusals = DroppedMessages("worker.stop", counts, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for step in range(300):
            now[0] = step / 100
            refusals.record(MalformedMessage(f"number {step}"))
        refusals.record(ValueError("a bug"))
    sample = metrics.registry.get_sample_value
    name = "antiphon_messages_refused_total"
    assert sample(name, {"route": "worker.stop", "reason": "malformed"}) == 300
    assert sample(name, {"route": "worker.stop", "reason": "internal"}) == 1
    lines = [(record.__dict__["reason"], record.__dict__["unlogged"]) for record in caplog.records]
    assert lines == [("number 0", 0), ("number 100", 99), ("number 200", 99), ("ValueError", 0)]
