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
ROUTER_BYTES = STATE_BYTES = 4


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
AIMS: Mapping[str, float] = {
    "memory": 0.85,
    "matmul": 0.70,
    "reads": 1.5,
    **{f"batch {rows}": share for rows, share in DECODE_AIMS.items()},
}
"""Of what is timed: a share of a copy, of the slower of products and a copy, reads of logits."""
_SAMPLING = ("block", "bound", "candidates", "floor", "floored", "invert")
TIMED: Mapping[str, frozenset[str]] = {
    "memory": frozenset(
        {
            *("activation.gated", "attention.merge", "attention.paged_attention", "heads.heads"),
            *("norm.finite", "norm.rmsnorm", "pages.gather"),
        }
    ),
    "matmul": frozenset(
        {
            *("expert_tiles.sort", "experts.combine", "experts.down"),
            *("experts.gate_up", "linear_fp8.multiply", "rounding.quantize"),
        }
    ),
    "reads": frozenset(f"sampling.{name}" for name in _SAMPLING),
}
"""The kernels that what has each aim launches, a test shows."""
LAUNCHES: Mapping[str, tuple[int, int]] = {
    "Llama-3.1-8B": (10, 13),
    "gemma-2-9b": (14, 16),
    "Qwen3-30B-A3B": (14, 13),
    "gpt-oss-20b": (14, 14),
    "DeepSeek-V3": (37, 20),
}
"""Of a step by a graph before its sampling, those of torch included and those between ranks not: of
a layer, of one with experts where there are both, and beside."""
DENSE_LAUNCHES: Mapping[str, int] = {"DeepSeek-V3": 29}
"""Of a layer without experts, where others have some."""
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

    Of experts those are read that some token has: with even routing, the expected number. Of a
    model with several ranks it is the cost of one.
    """
    if sizes.latent:
        return _latent_cost(sizes, layers, rows, keys)
    if sizes.recurrent:
        return _recurrent_cost(sizes, layers, rows, keys)
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


def _latent_cost(sizes: Sizes, layers: int, rows: int, keys: int) -> StepCost:
    """Of one rank of a model that caches latents, whose heads are absorbed, and has experts behind
    its first layers: a rank has a share of heads, widths and vocabulary, and all of the rest."""
    assert sizes.routed is not None, "a model with experts"
    fields, hidden, heads = sizes.fields, sizes.hidden, sizes.heads[0] // sizes.ranks
    content, turned, value = (
        int(fields[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query, latent = int(fields["q_lora_rank"]), int(fields["kv_lora_rank"])
    size, dense = latent + turned, int(fields["first_k_dense_replace"])
    attention = (
        hidden * (query + size)
        + query * heads * (content + turned)
        + heads * latent * (content + value)
        + heads * value * hidden
    )
    count, chosen = sizes.routed
    expert = 3 * hidden * int(fields["moe_intermediate_size"]) // sizes.ranks
    shared = int(fields["n_shared_experts"]) * expert
    whole, sparse = 3 * hidden * sizes.width // sizes.ranks, layers - dense
    head, router = hidden * sizes.vocabulary // sizes.ranks, hidden * count
    each = layers * attention + dense * whole + sparse * shared + head
    read = sparse * expert * used_experts(count, chosen, rows)
    seen = rows * layers * keys
    return StepCost(
        (each + read) * ITEM_BYTES + sparse * router * ROUTER_BYTES,
        seen * size * ITEM_BYTES,
        2 * rows * (each + sparse * (chosen * expert + router)) + 4 * seen * heads * size,
    )


def _recurrent_cost(sizes: Sizes, layers: int, rows: int, keys: int) -> StepCost:
    """The cost of a step of a model with gated delta nets, and attention in every few layers.

    A state is read and written, and so are the last inputs of its convolution; a token is
    multiplied with it twice, and added once.
    """
    assert sizes.experts is not None, "a model with experts"
    fields, hidden, (queries, kv_heads, size) = sizes.fields, sizes.hidden, sizes.heads
    key_heads, heads, key, value, taps = (
        int(fields[f"linear_{name}"])
        for name in (
            *("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"),
            "conv_kernel_dim",
        )
    )
    attending = layers // int(fields["full_attention_interval"])
    channels, width = 2 * key_heads * key + heads * value, heads * value
    attention = hidden * size * (3 * queries + 2 * kv_heads)  # as many gates as queries
    recurrence = hidden * (channels + width + 2 * heads) + width * hidden
    count, chosen = sizes.experts
    expert = 3 * hidden * int(fields["moe_intermediate_size"])
    shared = 3 * hidden * int(fields["shared_expert_intermediate_size"]) + hidden  # and its gate
    head, router = hidden * sizes.vocabulary, hidden * count
    each = attending * attention + (layers - attending) * recurrence + layers * shared + head
    read = layers * expert * used_experts(count, chosen, rows)
    seen, states = rows * attending * keys, rows * (layers - attending)
    numbers = heads * key * value
    state_bytes = numbers * STATE_BYTES + (taps - 1) * channels * ITEM_BYTES
    return StepCost(
        (each + read) * ITEM_BYTES + layers * router * ROUTER_BYTES,
        seen * 2 * kv_heads * size * ITEM_BYTES + 2 * states * state_bytes,
        2 * rows * (each + layers * (chosen * expert + router))
        + 4 * seen * queries * size
        + 6 * states * numbers,
    )


def used_experts(count: int, chosen: int, rows: int) -> float:
    """The expected number of experts that some of so many tokens has, if all are as likely."""
    return count * (1 - (1 - chosen / count) ** rows)


def launches_of(name: str, layers: int, dense: int = 0) -> int:
    """Launches of a step of a model by a graph; so many `dense` layers have no experts."""
    each, beside = LAUNCHES[name]
    return (layers - dense) * each + dense * DENSE_LAUNCHES.get(name, each) + beside
