"""Attention over long contexts: decode against the memory, in bfloat16 and fp8, and prefill against
a matrix multiplication.

Each layer of a decode step has its own KV cache, since in a real step
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
from antiphon.kernels.cpu.linear import PackedWeight
from antiphon.kernels.cpu.ops import paged_attention, qk_norm_rope_store
from antiphon.kernels.kv import beside, key_pages_shape, value_pages_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

PAGE_TOKENS = 64
FORMATS = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
TOKENS = 2048
"""Of the pass that stores keys and values."""
CASE_S = 4.0
"""About how long one case is measured."""
BLOCK = 1 << 16
"""Random numbers, which are repeated: every cache is whole blocks."""
CACHE_BYTES_MAX = 1 << 30
"""Decode cases with a larger KV cache in bfloat16 are left out."""
PREFILL_TOKENS = (1024, 8192)
GEMM_SIZE = 2048
GEMM, PREFILL = "gemm", "prefill"


class Shape(msgspec.Struct, frozen=True):
    name: str
    heads: int
    group: int
    size: int


SHAPES = (
    Shape("llama-135m", 3, 3, 64),
    Shape("qwen2.5-0.5b", 2, 7, 64),
    Shape("llama-3-8b", 8, 4, 128),
)


def a_cache(format_: torch.dtype, pages: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Pages of random keys and values, in huge pages as far as there are any."""
    page = (pages, PAGE_TOKENS, shape.heads, shape.size, torch.bfloat16)
    sizes = (key_pages_shape(*page), value_pages_shape(*page))
    stored = torch.bfloat16 if format_.itemsize == 2 else torch.uint8
    numbers = torch.randn(BLOCK).to(format_).view(stored)
    cache = huge_zeros(2 * pages * PAGE_TOKENS * shape.heads * shape.size, dtype=stored)
    cache.view(-1, BLOCK).copy_(numbers)
    return beside(cache.view(format_), *sizes)


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


def prefill(shape: Shape, tokens: int) -> Callable[[], object]:
    pages = tokens // PAGE_TOKENS
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    keys, values = a_cache(torch.bfloat16, pages, shape)
    q = torch.randn(tokens, shape.heads * shape.group, shape.size).bfloat16()
    count = np.array([tokens], np.int32)
    rows = AttentionMetadata(
        KvShape(PAGE_TOKENS, shape.heads, shape.group, shape.size, torch.bfloat16),
        table[None],
        count,
        count,
    )
    return lambda: paged_attention(q, keys, values, rows, shape.size**-0.5)


def gemm() -> Callable[[], object]:
    """A linear of as many rows and outputs as it has inputs."""
    weight = torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16()
    packed = PackedWeight(GEMM_SIZE, GEMM_SIZE, bias=False, dtype=torch.bfloat16, format_="packed")
    packed.write(0, weight)
    return partial(packed.linear.multiply, torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16())


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
    products = gemm()
    for shape in SHAPES:
        for context, batch in product((1024, 8192, 32768), (1, 16, 64)):
            numbers = 2 * batch * context * shape.heads * shape.size
            if 2 * numbers > CACHE_BYTES_MAX:
                continue
            layers = max(1, (96 << 20) // (2 * numbers))
            steps = {
                name: decode(shape, format_, batch, context, layers)
                for name, format_ in FORMATS.items()
            }
            times = rounds.alternate(steps, CASE_S)
            reads.append(read_gb_s(times))
            rows += _rows(f"{shape.name}, {batch} x {context}", times, layers, numbers)
        for tokens in PREFILL_TOKENS:
            times = rounds.alternate({PREFILL: prefill(shape, tokens), GEMM: products}, CASE_S)
            rows += _prefill_rows(shape, tokens, times)
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
            yield single("share", round(gb_s / read_gb_s(times), 3), case=case, arm=name)
        speedup = median(times["bfloat16"]) / median(times[name])
        yield single("speedup", round(speedup, 3), case=case, arm=name)


def _prefill_rows(
    shape: Shape, tokens: int, times: dict[str, list[float]]
) -> Iterable[Measurement]:
    """Yield the time of a prompt, and its rate of multiplications as a share of a linear's."""
    case = f"{shape.name}, prefill {tokens}"
    pairs = tokens * (tokens + 1) / 2 * shape.heads * shape.group
    rate = 2 * shape.size * pairs / median(times[PREFILL])
    share = rate / (GEMM_SIZE**3 / median(times[GEMM]))
    yield measured("ms", times[PREFILL], case=case, arm="bfloat16")
    yield single("share", round(share, 3), case=case, arm="bfloat16")
    yield single("speedup", 1.0, case=case, arm="bfloat16")


def main() -> None:
    run(arguments(__doc__), lambda _: measure())


if __name__ == "__main__":
    main()
