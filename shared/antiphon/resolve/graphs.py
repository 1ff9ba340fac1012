"""Which steps are captured as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.worker import captured_sizes
from antiphon.resolve.ranks import NOT_YET_RUN
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.config.worker import BatchingConfig
    from antiphon.model_card.pooling import Pooling
    from antiphon.resolve.device import HostDevice

NO_GRAPHS = ResolvedValue[tuple[int, ...]]((), "batching.graphs")
GRAPH_ROWS = 256
"""Default of `batching.graph_rows_max`; SGLang's on GPUs of up to 80 GB."""


def resolve_decode_graphs(
    settings: Settings, device: HostDevice, pooling: Pooling | None, running_max: int
) -> ResolvedValue[tuple[int, ...]]:
    """Batch sizes of the decode steps that are captured, with their sums over ranks."""
    if not settings.batching.decode_graphs:
        return ResolvedValue((), "batching.decode_graphs")
    if (reason := _uncaptured(settings, device)) is not None:
        return ResolvedValue((), reason)
    if pooling is not None:
        return ResolvedValue((), "nothing is generated")
    sizes = _decode_sizes(settings.batching, running_max)
    if settings.parallel.ranks == 1:
        return sizes
    return ResolvedValue(sizes.value, f"{sizes.reason}; sums over ranks inside: {NOT_YET_RUN}")


def _uncaptured(settings: Settings, device: HostDevice) -> str | None:
    """Why nothing is captured; None: something may be."""
    if not settings.batching.graphs:
        return NO_GRAPHS.reason
    if device.kind == "cpu":
        return "a GPU has them"
    if settings.parallel.attn_dp_size > 1:
        return "attention groups are launched layer by layer"
    if settings.speculation.algorithm == "eagle3":
        return "a draft head reads what enters single layers"
    return "stages are launched layer by layer" if settings.parallel.pp_size > 1 else None


def _decode_sizes(batching: BatchingConfig, running_max: int) -> ResolvedValue[tuple[int, ...]]:
    """Batch sizes of the decode steps that are captured."""
    if listed := captured_sizes(batching.graph_sizes):
        most = min(batching.graph_rows_max or listed[-1], running_max)
        sizes = tuple(size for size in listed if size <= most)
        return ResolvedValue(sizes, "batching.graph_sizes")
    most = min(batching.graph_rows_max or GRAPH_ROWS, running_max)
    if not batching.graph_padding:
        return ResolvedValue(tuple(range(1, most + 1)), "batching.graph_padding")
    # SGLang's: rare sizes are padded by up to a half, and others by less than a sixteenth.
    every = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most, 32))
    sizes = (*(size for size in every if size < most), most)
    return ResolvedValue(sizes, f"up to {most} running requests")


def resolve_prefill_graphs(
    settings: Settings, device: HostDevice, step_tokens: int
) -> ResolvedValue[tuple[int, ...]]:
    """Numbers of tokens of the prefills that are captured in pieces."""
    batching = settings.batching
    if not batching.prefill_graphs:
        return ResolvedValue((), "batching.prefill_graphs")
    if (reason := _uncaptured(settings, device)) is not None:
        return ResolvedValue((), reason)
    listed, most = captured_sizes(batching.prefill_graph_sizes), batching.prefill_graph_tokens_max
    if not listed and most is None:
        return ResolvedValue((), "batching.prefill_graph_sizes: none are listed")
    most = min(most or listed[-1], step_tokens)
    if listed:
        sizes = tuple(size for size in listed if size <= most)
        return ResolvedValue(sizes, "batching.prefill_graph_sizes")
    # SGLang's: from 64 tokens on they are padded by less than a quarter.
    every = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    every = (*every, *range(1280, 4097, 256), *range(4608, most, 512))
    sizes = (*(size for size in every if size < most), most)
    return ResolvedValue(sizes, f"up to {most} tokens of a step")
