"""Limits of the machine, from its measured memory and matrix-multiply rates.

A step reads all weights once and the keys and values of every request, and multiplies every token
with every weight: it takes as long as the longer of the two. Attention's own products, which no
case makes large, are left out; so are sampling, HTTP and all else that costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.machine import Device
    from tests.bench.models import Shape

BF16_BYTES = 2


def prefill_s(shape: Shape, device: Device, tokens: int) -> float:
    """Time that the products of so many prompt tokens take."""
    return 2 * shape.weights_count * tokens / (device.product_gflop_s * 1e9)


def step_s(
    shape: Shape,
    device: Device,
    rows: int,
    context_tokens: float,
    weight_bytes: int = BF16_BYTES,
) -> float:
    """Time of one decode step of so many requests with so many tokens behind each."""
    read = weight_bytes * shape.weights_count + rows * context_tokens * shape.kv_bytes
    return max(read / (device.read_gb_s * 1e9), prefill_s(shape, device, rows))


def output_limit(
    shape: Shape,
    device: Device,
    *,
    rows: int,
    new_tokens: int,
    prompt_tokens: int,
    output: int,
    weight_bytes: int = BF16_BYTES,
) -> float:
    """Return the output tok/s of so many clients, all of them always busy.

    `new_tokens` are the prompt tokens that no cache holds, `weight_bytes` those read of a weight.
    """
    behind = prompt_tokens + output / 2
    decode_s = (output - 1) * step_s(shape, device, rows, behind, weight_bytes)
    return rows * output / (prefill_s(shape, device, rows * new_tokens) + decode_s)
