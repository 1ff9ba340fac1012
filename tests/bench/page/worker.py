"""The sections of what a worker does alone: a step, attention, loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.kernels import step_report
from tests.bench.page.markdown import markdown, who

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Summary

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


def steps(summary: Summary) -> Iterable[str]:
    setup, machine = summary.setup, summary.machine
    yield STEPS_HEAD.format_map(setup) + "\n"
    yield (
        f"{machine.cpu}, {setup['isa']}, {setup['threads']} threads, commit {machine.commit}.\n\n"
    )
    yield markdown(
        ("rows x new of all", "default", "deterministic", "its cost", "beside", "torch", "limit"),
        (_step_cells(summary, case) for case in summary.cases()),
    )


def _step_cells(summary: Summary, case: str) -> Sequence[str]:
    default, strict, torch = (
        summary.row("step_ms", case=case, arm=way)
        for way in (step_report.DEFAULT, step_report.DETERMINISTIC, "torch")
    )
    beside, limit = (
        summary.row(quantity, case=case, arm=step_report.DEFAULT).middle
        for quantity in ("beside_ms", "limit_ms")
    )
    return (
        case,
        default.tenths(".2f"),
        strict.tenths(".2f"),
        f"{strict.middle / default.middle - 1:+.1%}",
        f"{beside:.2f} ({beside / default.middle:.1%})",
        f"{torch.middle:.2f}",
        f"{limit:.2f}",
    )


def shares(summary: Summary) -> Iterable[str]:
    """What a step spends outside of its kernels."""
    yield SHARE_HEAD.format_map(summary.setup) + "\n"
    yield f"{who(summary)}.\n\n"
    parts = summary.arms("cpu_ms")
    yield markdown(
        ("model", "clients", "step ms", *(f"{part} ms" for part in parts), "but kernels"),
        (_share_cells(summary, case, parts) for case in summary.cases()),
    )


def _share_cells(summary: Summary, case: str, parts: Sequence[str]) -> Sequence[str]:
    share = summary.row("share", case=case)
    return (
        *case.split(", "),
        f"{summary.row('step_ms', case=case).middle:.1f}",
        *(f"{summary.row('cpu_ms', case=case, arm=part).middle:.2f}" for part in parts),
        f"**{share.middle:.1%}** ({share.least:.1%}-{share.most:.1%})",
    )


def loading_weights(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    megabytes = int(setup["file_bytes"]) / 1e6
    yield LOADING_HEAD.format_map(setup | {"megabytes": megabytes}) + "\n"
    yield f"{who(summary)}; the disk reads {setup['disk_megabytes_per_s']:.0f} MB/s.\n\n"
    yield markdown(
        ("weights kept", "s", "CPU s", "MB/s", "of the disk's rate", "peak / weights"),
        (
            (
                case,
                f"{summary.row('seconds', case=case).middle:.2f}",
                f"{summary.row('cpu_seconds', case=case).middle:.2f}",
                f"{summary.row('megabytes_per_s', case=case).middle:.0f}",
                f"**{summary.row('share_of_disk_rate', case=case).middle:.2f}**",
                f"**{summary.row('peak_per_weight_bytes', case=case).middle:.2f}**",
            )
            for case in summary.cases()
        ),
    )


def eight_bits(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield KEPT_HEAD.format(tokens=setup["stored_tokens"]) + "\n"
    yield f"{who(summary)}; {setup['isa']}, {setup['threads']} threads; reads"
    yield f" {setup['memory_gb_s']:.1f} GB/s.\n\n"
    yield markdown(
        ("heads", "rows of tokens", "cache", "ms", "GB/s", "bfloat16 / this"),
        (
            _cache_cells(summary, case, form)
            for case in summary.cases()
            for form in summary.arms("ms")
        ),
    )


def _cache_cells(summary: Summary, case: str, form: str) -> Sequence[str]:
    rate = summary.find("read_gb_s", case=case, arm=form)
    return (
        *case.split(", "),
        form,
        summary.row("ms", case=case, arm=form).tenths(".3f"),
        "" if rate is None else f"{rate.middle:.1f}",
        f"**{summary.row('speedup', case=case, arm=form).middle:.2f}**",
    )
