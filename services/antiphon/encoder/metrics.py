"""Metrics of the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from antiphon.encoder.cache import EmbeddingCache
    from antiphon.telemetry.metrics import Metrics


class EncoderMetrics:
    """Metrics of images and cached embeddings."""

    def __init__(self, metrics: Metrics, cache: EmbeddingCache) -> None:
        self._cache = cache
        self._evictions_seen = 0
        self.received = metrics.counter(catalog.ENCODER_RECEIVED)
        self._answered = metrics.counter(catalog.ENCODER_REQUESTS)
        self.looked_up = metrics.counter(catalog.ENCODER_FILES)
        self._hits = metrics.counter(catalog.ENCODER_HITS)
        self._tokens = metrics.counter(catalog.ENCODER_TOKENS)
        self._hit_tokens = metrics.counter(catalog.ENCODER_HIT_TOKENS)
        self._evictions = metrics.counter(catalog.ENCODER_EVICTIONS)
        self.embed_seconds = metrics.histogram(catalog.ENCODER_SECONDS)
        metrics.gauge(catalog.ENCODER_CACHE_BYTES).set_function(lambda: cache.bytes_held)
        metrics.gauge(catalog.ENCODER_ENTRIES).set_function(lambda: len(cache))

    def answered(self, tokens: int, *, cached: bool) -> None:
        """Count an image that was answered."""
        self._answered.inc()
        self._tokens.inc(tokens)
        if cached:
            self._hits.inc()
            self._hit_tokens.inc(tokens)
        self._evictions.inc(self._cache.evictions - self._evictions_seen)
        self._evictions_seen = self._cache.evictions
