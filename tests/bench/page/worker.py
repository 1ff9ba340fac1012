"""The sections of what a worker does alone: a step, attention, loading."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.bench import share
from tests.bench.kernels import attention, step_report
from tests.bench.page.markdown import markdown, who

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench import loading

STEPS_HEAD = """
## One step

Whole steps of the {shape} shape in ms, medians and in brackets the tenth and the ninetieth
percentile, all ways in turn: as served, with `--enable-deterministic-inference`, and on torch's
operations.
Beside is what a step takes outside its layers and its head: Python, plan, checks and sampling. The
limit is reading weights and cache at the rate measured beside it.
"""
SHARE_HEAD = """
## Whose a step is

Processor time a decode step of the worker's two threads, over HTTP, by Linux' own count: of the
batching thread in kernels, in Python and on sending what the step drew, and of the bus thread,
whose upkeep (heartbeats and ticks) goes by time and not by steps. Medians of {windows} windows of
five seconds: [tests/bench/share.py](../tests/bench/share.py).
"""
LOADING_HEAD = """
## Loading

{model}, {megabytes:.0f} MB of weights in a file that the kernel's cache does not hold, each load in
a process of its own, in turn with a plain read of the same file from its beginning to its end:
medians of {rounds} pairs. The share is of the read just before. Memory is the most that the process
grew by, over the weights as they are kept: [tests/bench/loading.py](../tests/bench/loading.py).
"""
KEPT_HEAD = """
## Attention over a cache in eight bits

Decode steps of one layer, a token a row, on keys and values in bfloat16 and in fp8, in turn; and
the kernel that rotates the heads of {tokens} tokens and keeps their keys and values. Medians and,
in brackets, the 10th and 90th percentile: [tests/bench/kernels/attention.py]\
(../tests/bench/kernels/attention.py).
"""


def steps(report: step_report.Report) -> Iterable[str]:
    where = report.machine
    yield STEPS_HEAD.format(shape=report.shape) + "\n"
    yield f"{where.cpu}, {report.isa}, {report.threads} threads, commit {where.commit}.\n\n"
    yield markdown(
        ("rows x new of all", "default", "deterministic", "its cost", "beside", "torch", "limit"),
        (_step_cells(report, case) for case in report.cases()),
    )


def _step_cells(report: step_report.Report, case: step_report.Case) -> Sequence[str]:
    default, strict, torch = (
        report.of(case, way) for way in (step_report.DEFAULT, step_report.DETERMINISTIC, "torch")
    )
    return (
        f"{case.rows} x {case.new} of {case.kv}",
        f"{default.step.p50:.2f} ({default.step.p10:.2f}-{default.step.p90:.2f})",
        f"{strict.step.p50:.2f} ({strict.step.p10:.2f}-{strict.step.p90:.2f})",
        f"{strict.step.p50 / default.step.p50 - 1:+.1%}",
        f"{default.beside.p50:.2f} ({default.beside.p50 / default.step.p50:.1%})",
        f"{torch.step.p50:.2f}",
        f"{default.limit:.2f}",
    )


def shares(report: share.Report) -> Iterable[str]:
    """What a step spends outside of its kernels."""
    yield SHARE_HEAD.format(windows=len(report.cases[0].windows)) + "\n"
    yield f"{who(report.machine)}.\n\n"
    yield markdown(
        ("model", "clients", "step ms", *(f"{part} ms" for part in share.PARTS), "but kernels"),
        map(_share_cells, report.cases),
    )


def _share_cells(case: share.Shares) -> Sequence[str]:
    found = [window.share for window in case.windows]
    return (
        case.shape,
        str(case.clients),
        f"{median(window.step_ms for window in case.windows):.1f}",
        *(f"{median(w.part_ms(part) for w in case.windows):.2f}" for part in share.PARTS),
        f"**{median(found):.1%}** ({min(found):.1%}-{max(found):.1%})",
    )


def loading_weights(report: loading.Report) -> Iterable[str]:
    rounds, size = len(report.results[0].rounds), report.file_bytes / 1e6
    yield LOADING_HEAD.format(model=report.model, megabytes=size, rounds=rounds) + "\n"
    yield f"{who(report.machine)}; the disk reads {report.disk:.0f} MB/s.\n\n"
    yield markdown(
        ("weights kept", "s", "CPU s", "MB/s", "of the disk's rate", "peak / weights"),
        (
            (
                result.linear,
                f"{result.seconds:.2f}",
                f"{result.cpu_seconds:.2f}",
                f"{result.megabytes_per_s:.0f}",
                f"**{result.rate:.2f}**",
                f"**{result.peak:.2f}**",
            )
            for result in report.results
        ),
    )


def eight_bits(report: attention.Report) -> Iterable[str]:
    yield KEPT_HEAD.format(tokens=attention.TOKENS) + "\n"
    yield f"{who(report.machine)}; {report.isa}, {report.threads} threads; reads"
    yield f" {report.memory_gb_s:.1f} GB/s.\n\n"
    yield markdown(
        ("heads", "rows of tokens", "cache", "ms", "GB/s", "bfloat16 / this"),
        (
            (
                one.shape,
                one.what,
                one.format,
                f"{one.ms.p50:.3f} ({one.ms.p10:.3f}-{one.ms.p90:.3f})",
                f"{one.read_gb_s:.1f}" if one.read_gb_s else "",
                f"**{one.ratio:.2f}**",
            )
            for one in report.results
        ),
    )
