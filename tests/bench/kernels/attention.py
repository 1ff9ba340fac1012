"""Decode attention over long contexts: a KV cache in fp8 against one in bfloat16.

Each layer of a step has its own KV cache, since in a real step
a layer finds its KV cache in memory and not in the CPU caches.

    python -m tests.bench.kernels.attention --json FILE
"""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from tests.bench.kernels.rounds import Rounds, arguments, read_gb_s, run, setup
from tests.bench.summary import Measurement, Summary, here, measured, single

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.cpu.extension import huge_zeros
from antiphon.kernels.cpu.ops import paged_attention, qk_norm_rope_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

PAGE_TOKENS = 16
FORMATS = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
TOKENS = 2048
"""Of the pass that stores keys and values."""
CASE_S = 4.0
"""About how long one case is measured."""
BLOCK = 1 << 18
"""Random numbers, which are repeated: every cache is whole blocks."""


class Shape(msgspec.Struct, frozen=True):
    name: str
    heads: int
    group: int
    size: int


SHAPES = (Shape("llama-3-8b", 8, 4, 128), Shape("qwen2.5-0.5b", 2, 7, 64))


def a_cache(format_: torch.dtype, pages: int, shape: Shape) -> Tensor:
    """Keys and values (2, P, S, H, D), random, in huge pages as far as there are any."""
    size = (2, pages, PAGE_TOKENS, shape.heads, shape.size)
    cache = huge_zeros(*size, dtype=torch.bfloat16 if format_.itemsize == 2 else torch.uint8)
    numbers = torch.randn(BLOCK).to(format_)
    flat = numbers if format_ is torch.bfloat16 else numbers.view(torch.uint8)
    cache.view(-1, BLOCK).copy_(flat)
    return cache.view(format_)


def decode(
    shape: Shape, format_: torch.dtype, batch: int, context: int, layers: int
) -> Callable[[], object]:
    each = context // PAGE_TOKENS
    table = np.random.default_rng(0).permutation(batch * each).astype(np.int32)
    caches = [a_cache(format_, batch * each, shape) for _ in range(layers)]
    q = torch.randn(batch, shape.heads * shape.group, shape.size).bfloat16()
    rows = AttentionMetadata(
        KvShape(PAGE_TOKENS, shape.heads, shape.group, shape.size, torch.bfloat16),
        table.reshape(batch, each),
        np.ones(batch, np.int32),
        np.full(batch, context, np.int32),
    )
    _ = rows.compiled

    def once() -> None:
        for keys, values in caches:
            paged_attention(q, keys, values, rows, shape.size**-0.5)

    return once


def store(shape: Shape, format_: torch.dtype) -> Callable[[], object]:
    """Rotate a chunk's heads, and keep its keys and values."""
    cache = a_cache(format_, TOKENS // PAGE_TOKENS, shape)
    heads = torch.randn(TOKENS, shape.heads * (shape.group + 2), shape.size).bfloat16()
    turns = torch.rand(TOKENS, 1, shape.size).bfloat16()
    places = torch.arange(TOKENS)
    return partial(qk_norm_rope_store, heads, turns, turns, *cache, places, None)


def measure() -> Summary:
    rounds, rows = Rounds(), list[Measurement]()
    reads: list[float] = []
    for shape in SHAPES:
        for context, batch in product((1024, 8192), (1, 16)):
            numbers = 2 * batch * context * shape.heads * shape.size
            layers = max(1, (96 << 20) // (2 * numbers))
            steps = {
                name: decode(shape, format_, batch, context, layers)
                for name, format_ in FORMATS.items()
            }
            times = rounds.alternate(steps, CASE_S)
            reads.append(read_gb_s(times))
            rows += _rows(f"{shape.name}, {batch} x {context}", times, layers, numbers)
        stores = {name: store(shape, format_) for name, format_ in FORMATS.items()}
        times = rounds.alternate(stores, CASE_S)
        rows += _rows(f"{shape.name}, store {TOKENS}", times, layers=1, numbers=0)
    more = {"memory_gb_s": round(median(reads), 1), "stored_tokens": TOKENS}
    return here("attention", setup() | more, rows)


def _rows(
    case: str, times: dict[str, list[float]], layers: int, numbers: int
) -> Iterable[Measurement]:
    """Yield the time of a layer in each format, and the rate at which it reads its numbers."""
    for name, format_ in FORMATS.items():
        ms = [taken / layers for taken in times[name]]
        yield measured("ms", ms, case=case, arm=name)
        if numbers:
            gb_s = numbers * format_.itemsize / median(ms) / 1e6
            yield single("read_gb_s", round(gb_s, 1), case=case, arm=name)
        speedup = median(times["bfloat16"]) / median(times[name])
        yield single("speedup", round(speedup, 3), case=case, arm=name)


def main() -> None:
    run(arguments(__doc__), lambda _: measure())


if __name__ == "__main__":
    main()
