"""Decode attention over long contexts: a KV cache in fp8 against one in bfloat16.

Each round reads a buffer larger than any CPU cache, then runs every variant once, so that other
processes disturb all of them alike. Each layer of a step has its own KV cache, since in a real step
a layer finds its KV cache in memory and not in the CPU caches. Ratios are of the medians of a run.

    python -m tests.bench.kernels.attention --json FILE
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Figure, Machine, machine
from tests.bench.kernels.linears import SWEEP_BYTES, alternate
from tests.bench.summary import Measurement, Summary, of_figure, single, write_results

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import huge_zeros
from antiphon.kernels.cpu.ops import paged_attention, qk_norm_rope_store

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Heads of a layer."""

    name: str
    heads: int
    group: int
    size: int


SHAPES = (Shape("llama-3-8b", 8, 4, 128), Shape("qwen2.5-0.5b", 2, 7, 64))


class Result(msgspec.Struct, frozen=True):
    """One step of one layer, one way.

    Attributes:
        read_gb_s: Of keys and values, as they are kept.
        ratio: Time of bfloat16, by this; above one is faster.
    """

    shape: str
    what: str
    format: str
    ms: Figure
    read_gb_s: float
    ratio: float


class Report(msgspec.Struct, frozen=True):
    """One run. `memory_gb_s` is the rate of plain reads beside it."""

    machine: Machine
    isa: str
    threads: int
    memory_gb_s: float
    results: list[Result]


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
    """Attention of a decode step in all layers, with shuffled pages."""
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


def measure() -> Report:
    """Every shape, context and batch, each format in turn."""
    sweep = huge_zeros(SWEEP_BYTES // 8, dtype=torch.int64)
    sweep.fill_(1)
    results: list[Result] = []
    reads: list[float] = []
    cases = [(batch, context) for context in (1024, 8192) for batch in (1, 16)]
    for shape in SHAPES:
        for batch, context in cases:
            read = 2 * batch * context * shape.heads * shape.size
            layers = max(1, (96 << 20) // (2 * read))
            work = {
                name: decode(shape, format_, batch, context, layers)
                for name, format_ in FORMATS.items()
            }
            times = alternate({"read": sweep.sum, **work}, CASE_S)
            reads.append(SWEEP_BYTES / times["read"].p50 / 1e6)
            what = f"{batch} x {context}"
            results += _results(shape, what, times, layers, read)
        stores = {name: store(shape, format_) for name, format_ in FORMATS.items()}
        times = alternate({"read": sweep.sum, **stores}, CASE_S)
        results += _results(shape, f"store {TOKENS}", times, 1, 0)
    isa, threads = extension.load().isa(), torch.get_num_threads()
    return Report(machine(), isa, threads, round(float(np.median(reads)), 1), results)


def _results(
    shape: Shape, what: str, times: dict[str, Figure], layers: int, numbers: int
) -> list[Result]:
    found: list[Result] = []
    for name, format_ in FORMATS.items():
        p50, p10, p90 = (
            round(part / layers, 4) for part in (times[name].p50, times[name].p10, times[name].p90)
        )
        ms = Figure(p50, p10, p90, times[name].n)
        gb_s = round(numbers * format_.itemsize / ms.p50 / 1e6, 1)
        ratio = round(times["bfloat16"].p50 / times[name].p50, 3)
        found.append(Result(shape.name, what, name, ms, gb_s, ratio))
    return found


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    rows: list[Measurement] = []
    for one in report.results:
        case = f"{one.shape}, {one.what}"
        rows.append(of_figure("ms", one.ms, case=case, arm=one.format))
        if one.read_gb_s:
            rows.append(single("read_gb_s", one.read_gb_s, case=case, arm=one.format))
        rows.append(single("speedup", one.ratio, case=case, arm=one.format))
    return Summary(
        section="attention",
        machine=report.machine,
        setup={
            "isa": report.isa,
            "threads": report.threads,
            "memory_gb_s": report.memory_gb_s,
            "stored_tokens": TOKENS,
        },
        rows=tuple(rows),
    )


def show(report: Report) -> Table:
    """Lay out the results."""
    title = f"{report.isa}, {report.threads} threads; memory reads {report.memory_gb_s} GB/s"
    table = Table(title=title)
    for column in (
        "shape",
        "batch x context",
        "cache",
        "ms a layer",
        "GB/s",
        "vs. bfloat16",
    ):
        table.add_column(column, justify="right")
    for one in report.results:
        table.add_row(
            one.shape,
            one.what,
            one.format,
            f"{one.ms.p50:.3f} ({one.ms.p10:.3f}-{one.ms.p90:.3f})",
            f"{one.read_gb_s:.1f}" if one.read_gb_s else "",
            f"{one.ratio:.2f}",
            end_section=one.format == "fp8_e5m2",
        )
    return table


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        report = measure()
    Console(width=120).print(show(report))
    if arguments.json:
        write_results(arguments.json, report, summarize(report))


if __name__ == "__main__":
    main()
