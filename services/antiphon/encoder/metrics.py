"""What the encoder counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EncoderMetrics:
    """Named `antiphon_encoder_*`, in the process's registry."""

    def __init__(self, registry: CollectorRegistry, cache_bytes: Callable[[], int]) -> None:
        self.hits = Counter(
            "antiphon_encoder_hits", "Images whose embedding was kept.", registry=registry
        )
        self.embed_seconds = Histogram(
            "antiphon_encoder_embed_seconds",
            "Decoding and embedding one image.",
            registry=registry,
            buckets=_SECONDS,
        )
        held = Gauge("antiphon_encoder_cache_bytes", "Embeddings kept.", registry=registry)
        held.set_function(cache_bytes)
