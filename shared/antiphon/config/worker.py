"""The worker's loop: how much one step holds, and how many pages there are."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Ratio, Requests, Seconds, Tokens


class BatchingConfig(Config):
    """How many tokens and requests one step may hold."""

    tokens_max: Annotated[Tokens, Help("Most tokens in one forward pass.")] = 2048
    running_max: Annotated[Requests, Help("Most requests running at once.")] = 64
    chunk_tokens: Annotated[
        Tokens | None, Help("Longest prefill piece; unset means tokens_max.")
    ] = None
    stall_s: Annotated[
        Seconds, Help("A worker with work and no step for this long is reported stalled.")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens > self.tokens_max:
            raise ValueError("chunk_tokens exceeds tokens_max, so no chunk could ever run")


class CacheConfig(Config):
    """The KV page pool."""

    tokens_max: Annotated[
        Tokens | None, Help("Tokens that the pool holds; unset: from free memory.")
    ] = None
    memory_ratio: Annotated[
        Ratio, Help("Share of the memory left after the weights that the pool takes.")
    ] = 0.25
    static_ratio: Annotated[
        Ratio | None, Help("Share of free memory for weights and pool; set, it decides alone.")
    ] = None
    bytes_max: Annotated[
        Bytes, Help("Most memory that the pool takes when its size is chosen for it.")
    ] = 2 * 1024**3
