"""What a worker counts of grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from antiphon.telemetry.metrics import Metrics


class GrammarMetrics:
    """Counted by choice, as SGLang counts each answer of a request.

    Attributes:
        requested: Choices with a grammar.
        hits: Those whose grammar was compiled before, or known to have a mistake.
        aborted: Those that were refused or ended before their grammar was ready.
        timeouts: Compiles and answers so far that took too long.
        seconds: Time of each compile that succeeded.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.requested = metrics.counter(catalog.NUM_GRAMMAR)
        self.hits = metrics.counter(catalog.NUM_GRAMMAR_CACHE_HIT)
        self.aborted = metrics.counter(catalog.NUM_GRAMMAR_ABORTED)
        self.timeouts = metrics.counter(catalog.NUM_GRAMMAR_TIMEOUT)
        self.seconds = metrics.histogram(catalog.GRAMMAR_COMPILATION)
