"""The sections of the worker alone: a step, attention, loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import lines, machine_line, markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Summary

STEPS_HEAD = """
## One step

Time of a whole step of the {shape} shape in ms: medians, with the 10th and 90th percentile in
parentheses; all variants in turn. The variants are the default, `--enable-deterministic-inference`,
and torch's own operations. Overhead is the time outside the layers and the LM head: Python,
planning, checks and sampling. The limit is reading weights and KV cache at the memory rate measured
alongside.
"""
SHARE_HEAD = """
## Where the time of a decode step goes

CPU time per decode step of the worker's two threads, over HTTP, as Linux counts it: of the batching
thread in kernels, in Python and in sending sampled tokens, and of the bus thread, whose upkeep
(heartbeats and ticks) depends on time and not on steps. Medians of {windows} windows of five
seconds: [tests/bench/share.py](../tests/bench/share.py).
"""
LOADING_HEAD = """
## Loading

{model}, {megabytes:.0f} MB of weights in a file that is not in the page cache. Each load runs in a
process of its own, in turn with a sequential read of the same file. Medians of {rounds} pairs; the
share is that of the read just before. Memory is the peak growth of the process, relative to the
weights as stored: [tests/bench/loading.py](../tests/bench/loading.py).
"""
KEPT_HEAD = """
## Attention over long contexts

Decode steps of one layer, one token per sequence, with keys and values in bfloat16 and in fp8, in
turn; prefill of one prompt; and the fused RoPE and KV store kernel on {tokens} tokens. The share is
that of the read rate, and for prefill of the rate of a large linear, measured in turn. Medians,
with the 10th and 90th percentile in parentheses: [tests/bench/kernels/attention.py]\
(../tests/bench/kernels/attention.py).
"""


def steps(summary: Summary) -> Iterable[str]:
    setup, machine = summary.setup, summary.machine
    yield STEPS_HEAD.format_map(setup) + "\n"
    yield (
        f"{machine.cpu}, {setup['isa']}, {setup['threads']} threads, commit {machine.commit}.\n\n"
    )
    yield markdown(
        (
            "batch x new of context",
            "default",
            "deterministic",
            "cost",
            "overhead",
            "torch",
            "limit",
        ),
        (_step_cells(summary, case) for case in summary.cases()),
    )


def _step_cells(summary: Summary, case: str) -> Sequence[str]:
    default, strict, torch = (
        summary.row("step_ms", case=case, arm=way) for way in ("default", "deterministic", "torch")
    )
    beside, limit = (
        summary.row(quantity, case=case, arm="default").middle
        for quantity in ("beside_ms", "limit_ms")
    )
    return (
        case,
        f"{default:.2f tenths}",
        f"{strict:.2f tenths}",
        f"{strict.middle / default.middle - 1:+.1%}",
        f"{beside:.2f} ({beside / default.middle:.1%})",
        f"{torch:.2f}",
        f"{limit:.2f}",
    )


def shares(summary: Summary) -> Iterable[str]:
    yield SHARE_HEAD.format_map(summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    parts = summary.arms("cpu_ms")
    yield markdown(
        ("model", "clients", "step ms", *(f"{part} ms" for part in parts), "outside kernels"),
        lines(
            summary,
            "{step_ms:.1f}",
            *(f"{{cpu_ms {part}:.2f}}" for part in parts),
            "**{share:.1%}** ({share.least:.1%}-{share.most:.1%})",
            split=True,
        ),
    )


def loading_weights(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    megabytes = int(setup["file_bytes"]) / 1e6
    yield LOADING_HEAD.format_map(setup | {"megabytes": megabytes}) + "\n"
    yield f"{machine_line(summary)}; the disk reads {setup['disk_megabytes_per_s']:.0f} MB/s.\n\n"
    yield markdown(
        ("weights stored as", "s", "CPU s", "MB/s", "share of disk rate", "peak / weights"),
        lines(
            summary,
            *("{seconds:.2f}", "{cpu_seconds:.2f}", "{megabytes_per_s:.0f}"),
            *("**{share_of_disk_rate:.2f}**", "**{peak_per_weight_bytes:.2f}**"),
        ),
    )


def eight_bits(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield KEPT_HEAD.format(tokens=setup["stored_tokens"]) + "\n"
    yield f"{machine_line(summary)}; {setup['isa']}, {setup['threads']} threads; reads"
    yield f" {setup['memory_gb_s']:.1f} GB/s.\n\n"
    yield markdown(
        ("heads as in", "batch x context", "cache", "ms", "GB/s", "share", "speedup over bfloat16"),
        (
            _cache_cells(summary, case, form)
            for case in summary.cases()
            for form in summary.arms("ms")
        ),
    )


def _cache_cells(summary: Summary, case: str, form: str) -> Sequence[str]:
    rate = summary.find("read_gb_s", case=case, arm=form)
    share = summary.find("share", case=case, arm=form)
    return (
        *case.split(", "),
        form,
        f"{summary.row('ms', case=case, arm=form):.3f tenths}",
        "" if rate is None else f"{rate:.1f}",
        "" if share is None else f"{share:.2f}",
        f"**{summary.row('speedup', case=case, arm=form):.2f}**",
    )
