"""Prints the launches of a pass of some models: `python -m tests.kernels.interpreted.launches`."""

from __future__ import annotations

import sys

import msgspec
import torch

from antiphon.kernels.triton import interpreter

interpreter.enable()

SHAPES = {
    "embedded": (192, 512, 6, 2, 32, 1024),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128256),
}
"""Hidden and feed-forward size, query and kv heads, head size, vocabulary."""


def run(model: str, dtype: torch.dtype) -> None:
    """A prefill of 30 tokens and two decodes, one of them long, then all that sampling may do."""
    # Both import the kernels, which are interpreted from their import on.
    from tests.kernels.interpreted.checks import Rows, a_shape, randn  # noqa: PLC0415

    from antiphon.kernels.norm import NormWeights  # noqa: PLC0415
    from antiphon.kernels.op import DeviceCapability  # noqa: PLC0415
    from antiphon.kernels.ops import select  # noqa: PLC0415
    from antiphon.kernels.rotary import QkNormWeights  # noqa: PLC0415

    ops = select(DeviceCapability("interpreter", dtype))
    hidden, width, queries, kv_heads, size, vocabulary = SHAPES[model]
    x, weight = randn(2, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    ops.rmsnorm(x, weight, 1e-5)
    ops.add_rmsnorm(x, x, weight, 1e-5)
    ops.rmsnorm_wide(x, weight.float(), 1e-5)
    ops.finite_rows(x)
    ops.silu_mul(randn(1, 2 * width, dtype=dtype))
    norm = NormWeights(randn(size, dtype=dtype))
    for window, last in ((None, 600), (None, 5), (64, 5)):
        shape = a_shape(kv_heads, queries // kv_heads, size, 16, window, dtype)
        case = Rows([30, 1, 1], [0, 3, last], shape, pages=60)
        ops.paged_attention(case.q, case.keys, case.values, case.rows, case.scale)
        for norms in (None, QkNormWeights(norm, norm, 1e-6)):
            heads = randn(32, queries + 2 * kv_heads, size, dtype=dtype)
            turns = torch.ones(32, 1, size, dtype=dtype)
            slots = case.rows.slot_mapping
            ops.qk_norm_rope_store(heads, turns, turns, case.keys, case.values, slots, norms)
    logits = randn(2, vocabulary)
    logits[:, 4:] -= 100
    ones, entry = torch.ones(2), torch.tensor([1])
    ops.penalize(logits, entry, entry, ones[:1], ones[:1], ones[:1], ones[:1])
    ops.bias(logits, entry, entry, ones[:1])
    ops.mask(logits, entry, torch.full((1, -(-vocabulary // 32)), -1, dtype=torch.int32))
    ops.argmax(logits)
    ops.finite_rows(logits)
    ops.logsumexp(logits, ones)
    uniform = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ops.sample(logits, uniform, ones, torch.tensor([0, 0]), ones, ones * 0)


def main() -> None:
    from antiphon.kernels.triton.launch import recording  # noqa: PLC0415

    with recording() as launches:
        for model in SHAPES:
            for dtype in (torch.float32, torch.float16):
                run(model, dtype)
    sys.stdout.buffer.write(msgspec.json.encode(sorted(launches, key=str)))


if __name__ == "__main__":
    main()
