"""What a decode step costs at least: what it must read, its products, and how long a GPU takes.

Formulae for a step of so many rows, which have as many keys each. Launches are counted in a dry
run. `tests/gpu/test_costs.py` compares all of it with what such a step launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.kernels.published import Sizes

ITEM_BYTES = 2
"""Of weights, keys and values."""
ROUTER_BYTES = 4


class GpuRates(NamedTuple):
    """What a GPU does in a second, by its data sheet: bytes, and bfloat16 operations."""

    bytes_s: float
    operations_s: float


GPUS: Mapping[str, GpuRates] = {
    "H100": GpuRates(3.35e12, 989e12),
    "H200": GpuRates(4.8e12, 989e12),
}
"""With SXM."""
DECODE_AIMS: Mapping[int, float] = {1: 0.85, 256: 0.65}
"""The share of the roofline that decode steps of so many rows should reach."""
LAUNCHES: Mapping[str, tuple[int, int]] = {
    "Llama-3.1-8B": (10, 13),
    "gemma-2-9b": (14, 16),
    "Qwen3-30B-A3B": (14, 13),
    "gpt-oss-20b": (14, 14),
}
"""Of a step by a graph before its sampling, those of torch included: of a layer, and beside."""
GROUPED_BYTES: Mapping[str, tuple[float, float]] = {
    "Llama-3.1-8B": (0.5 + 2 * 2 / 128, ITEM_BYTES),
    "gpt-oss-20b": (ITEM_BYTES, 0.5 + 2 / 32),
}
"""Of a weight of the layers' linears, and of one of an expert, with its part of the scale, and of
the minimum, of a group, where models are served in AWQ and MXFP4."""


class StepCost(NamedTuple):
    """What a decode step costs."""

    weight_bytes: float
    cache_bytes: float
    operations: float

    def seconds(self, rates: GpuRates) -> float:
        """The time of the slower of both: what is read, and what is computed."""
        read_s = (self.weight_bytes + self.cache_bytes) / rates.bytes_s
        return max(read_s, self.operations / rates.operations_s)


def decode_cost(
    sizes: Sizes,
    layers: int,
    rows: int,
    keys: int,
    linear_bytes: float = ITEM_BYTES,
    expert_bytes: float = ITEM_BYTES,
) -> StepCost:
    """The cost of a step of so many rows, each of which attends to so many keys.

    Of experts those are read that some token has: with even routing, the expected number.
    """
    queries, kv_heads, size = sizes.heads
    attention = sizes.hidden * size * (2 * queries + 2 * kv_heads)
    expert, head = 3 * sizes.hidden * sizes.width, sizes.hidden * sizes.vocabulary
    routers, read, multiplied = 0, expert * linear_bytes, expert
    if sizes.experts is not None:
        count, chosen = sizes.experts
        routers = layers * sizes.hidden * count
        read = expert * used_experts(count, chosen, rows) * expert_bytes
        multiplied = chosen * expert
    windowed = 0 if sizes.window is None else -(-layers // 2)
    seen = (layers - windowed) * keys + windowed * min(keys, sizes.window or 0)
    return StepCost(
        layers * (attention * linear_bytes + read) + head * ITEM_BYTES + routers * ROUTER_BYTES,
        rows * seen * 2 * kv_heads * size * ITEM_BYTES,
        2 * rows * (layers * (attention + multiplied) + head + routers)
        + 4 * rows * seen * queries * size,
    )


def used_experts(count: int, chosen: int, rows: int) -> float:
    """The expected number of experts that some of so many tokens has, if all are as likely."""
    return count * (1 - (1 - chosen / count) ** rows)


def launches_of(name: str, layers: int) -> int:
    """Launches of a step of a model by a graph."""
    each, beside = LAUNCHES[name]
    return layers * each + beside
