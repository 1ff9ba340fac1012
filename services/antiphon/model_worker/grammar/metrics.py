"""Metrics of grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from antiphon.telemetry.metrics import Metrics


class GrammarMetrics:
    """Counted per sequence, as SGLang counts each output of a request.

    Attributes:
        requested: Sequences with a grammar.
        hits: Those whose grammar was cached, as compiled or as invalid.
        aborted: Those that failed or were aborted before their grammar was ready.
        timeouts: Compiles and replays that timed out.
        seconds: Time of each compile that succeeded.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.requested = metrics.counter(catalog.NUM_GRAMMAR)
        self.hits = metrics.counter(catalog.NUM_GRAMMAR_CACHE_HIT)
        self.aborted = metrics.counter(catalog.NUM_GRAMMAR_ABORTED)
        self.timeouts = metrics.counter(catalog.NUM_GRAMMAR_TIMEOUT)
        self.seconds = metrics.histogram(catalog.GRAMMAR_COMPILATION)
