"""Packed linears against the memory rate and against torch: all linears of a model in order.

Each round reads a buffer larger than any CPU cache, then runs every variant once, so that other
processes disturb all of them alike. Ratios are of the medians of a run. With one thread, the time
is that thread's CPU time, which other processes lengthen only by their use of memory.

    python -m tests.bench.kernels.linears --shape llama-135m --json FILE
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Figure, Machine, figure, machine
from tests.bench.models import SHAPES, Shape
from tests.bench.summary import Summary, of_figure, single, write_results

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import huge_zeros
from antiphon.kernels.cpu.linear import Format, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

SWEEP_BYTES = 1 << 28
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
FORMATS: tuple[Format, ...] = ("packed", "int8", "int8_dynamic")
ROUNDS_S = 20.0
"""About how long one number of rows is measured."""


class Result(msgspec.Struct, frozen=True):
    """All linears of a model, once, with so many rows.

    Attributes:
        read_share: Of the read rate, as if reading the weights were all there is to do.
        torch_ratio: Time of torch's bf16 linears, by ours; above one is faster.
    """

    rows: int
    way: str
    ms: Figure
    gb_s: float
    gflop_s: float
    read_share: float
    torch_ratio: float


class Report(msgspec.Struct, frozen=True):
    """One run."""

    machine: Machine
    isa: str
    threads: int
    shape: str
    read_gb_s: dict[int, float]
    results: list[Result]


def sizes(shape: Shape) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of each linear, in the order of a step."""
    head = shape.hidden // shape.heads
    for _ in range(shape.layers):
        yield shape.hidden, head * (shape.heads + 2 * shape.kv_heads)
        yield shape.hidden, shape.hidden
        yield shape.hidden, 2 * shape.intermediate
        yield shape.intermediate, shape.hidden
    yield shape.hidden, shape.vocabulary


@dataclass(frozen=True)
class Way:
    """One way to multiply by all weights; `read_bytes` is what it reads for it."""

    read_bytes: int
    linears: Sequence[tuple[int, Callable[[Tensor], Tensor]]]

    def __call__(self, by_inputs: Mapping[int, Tensor]) -> None:
        """Multiply the x that has a linear's number of inputs, linear after linear."""
        for inputs, multiply in self.linears:
            multiply(by_inputs[inputs])


def ways(shape: Shape) -> dict[str, Way]:
    """Torch first, then every format of ours."""
    weights = [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in sizes(shape)]
    plain = [(weight.shape[1], partial(F.linear, weight=weight)) for weight in weights]
    found = {"torch": Way(sum(weight.nbytes for weight in weights), plain)}
    for format_ in FORMATS:
        kept = [packed(weight, format_) for weight in weights]
        linears = [
            (weight.shape[1], one.linear.multiply)
            for weight, one in zip(weights, kept, strict=True)
        ]
        found[format_] = Way(sum(one.nbytes for one in kept), linears)
    return found


def packed(weight: Tensor, format_: Format) -> PackedWeight:
    """Pack one."""
    outputs, inputs = weight.shape
    made = PackedWeight(inputs, outputs, bias=False, dtype=weight.dtype, format_=format_)
    made.write(0, weight)
    return made


def measure(shape: Shape, rows: tuple[int, ...]) -> Report:
    """Measure every way with each number of rows."""
    found = ways(shape)
    sweep = huge_zeros(SWEEP_BYTES // 8, dtype=torch.int64)
    sweep.fill_(1)  # zeros that were never written are one page, read again and again
    macs = sum(inputs * outputs for inputs, outputs in sizes(shape))
    read_gb_s: dict[int, float] = {}
    results: list[Result] = []
    for count in rows:
        by_inputs = {
            inputs: torch.randn(count, inputs).bfloat16() for inputs, _ in set(sizes(shape))
        }
        work = {name: partial(way, by_inputs) for name, way in found.items()}
        times = alternate({"read": sweep.sum, **work})
        read_gb_s[count] = round(SWEEP_BYTES / times["read"].p50 / 1e6, 1)
        for name, way in found.items():
            ms = times[name]
            gb_s = way.read_bytes / ms.p50 / 1e6
            results.append(
                Result(
                    rows=count,
                    way=name,
                    ms=ms,
                    gb_s=round(gb_s, 1),
                    gflop_s=round(2 * macs * count / ms.p50 / 1e6, 1),
                    read_share=round(gb_s / read_gb_s[count], 3),
                    torch_ratio=round(times["torch"].p50 / ms.p50, 3),
                )
            )
    isa = extension.load().isa()
    return Report(machine(), isa, torch.get_num_threads(), shape.name, read_gb_s, results)


def alternate(
    work: dict[str, Callable[[], object]], seconds: float = ROUNDS_S
) -> dict[str, Figure]:
    """Time each in turn, round after round, in ms, for about so long."""
    times: dict[str, list[float]] = {name: [] for name in work}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times["read"]) < 6:
        for name, once in work.items():
            start = clock()
            once()
            times[name].append((clock() - start) * 1e3)
    return {name: figure(taken[1:]) for name, taken in times.items()}


def summarize(report: Report) -> Summary:
    """Reduce a run to rows."""
    rows = [
        single("read_gb_s", rate, case=f"{count} rows", arm="plain read")
        for count, rate in report.read_gb_s.items()
    ]
    for one in report.results:
        case = f"{one.rows} rows"
        rows += [
            of_figure("ms", one.ms, case=case, arm=one.way),
            single("read_gb_s", one.gb_s, case=case, arm=one.way),
            single("gflop_s", one.gflop_s, case=case, arm=one.way),
            single("speedup_over_torch", one.torch_ratio, case=case, arm=one.way),
        ]
    return Summary(
        section="linears",
        machine=report.machine,
        setup={"shape": report.shape, "isa": report.isa, "threads": report.threads},
        rows=tuple(rows),
    )


def show(report: Report) -> Table:
    """Lay out the results."""
    table = Table(title=f"{report.shape}, {report.isa}, {report.threads} threads")
    for column in ("rows", "way", "ms", "GB/s", "of the read rate", "GFLOP/s", "torch / this"):
        table.add_column(column, justify="right")
    for one in report.results:
        table.add_row(
            str(one.rows),
            one.way,
            f"{one.ms.p50:.2f} ({one.ms.p10:.2f}-{one.ms.p90:.2f})",
            f"{one.gb_s:.1f} of {report.read_gb_s[one.rows]:.1f}",
            f"{one.read_share:.0%}",
            f"{one.gflop_s:.0f}",
            f"{one.torch_ratio:.2f}",
            end_section=one.way == FORMATS[-1],
        )
    return table


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        report = measure(SHAPES[arguments.shape], tuple(arguments.rows))
    Console(width=120).print(show(report))
    if arguments.json:
        write_results(arguments.json, report, summarize(report))


if __name__ == "__main__":
    main()
