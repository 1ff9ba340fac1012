"""What the encoder counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.telemetry.metrics import Metrics


class EncoderMetrics:
    """Images, and the embeddings that are cached of them."""

    def __init__(self, metrics: Metrics, cache_bytes: Callable[[], int]) -> None:
        self.hits = metrics.counter(catalog.ENCODER_HITS)
        self.embed_seconds = metrics.histogram(catalog.ENCODER_SECONDS)
        metrics.gauge(catalog.ENCODER_CACHE_BYTES).set_function(cache_bytes)
