"""The sections of all services together: what they take, and what minutes of load leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, who

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary

PLANNING_HEAD = """
## Planning

Processor time of the batching loop beside the model, in us: a worker that is kept full plans a
step, and commits what it drew. Medians of {steps:,} steps and in brackets the tenth and the
ninetieth percentile: [tests/bench/planning.py](../tests/bench/planning.py).
"""
SERVICES_HEAD = """
## What the services take

Of one core, in percent, while a worker that computes nothing says {tokens_per_s:.0f} tokens a
second to 16 clients over HTTP: medians of {rounds} rounds. The worker is left out:
[tests/bench/services_cpu.py](../tests/bench/services_cpu.py).
"""
BODIES_HEAD = """
## Large bodies of one client

One client posts a large body while {streams} chats of another tenant stream: p99 of their gaps in
ms, without the body and with it, {rounds} windows of each in turn. The difference is the median of
the pairs; it has to be at most {most:g} ms. No stream ended early, and none was refused:
[tests/bench/bodies.py](../tests/bench/bodies.py).
"""
SOAK_HEAD = """
## Ten minutes of random load

{requests:,} requests over HTTP and NATS in {minutes:.0f} minutes, of which {left:.0%} left early
and {refused:.0%} were refused or came too late, with so little room that {retractions:,} answers
lost their pages on the way: what is left when all have gone, and how the memory of each service
grew in the second half:
[tests/bench/soak.py](../tests/bench/soak.py).
"""


def planned(summary: Summary) -> Iterable[str]:
    steps = int(summary.setup["rounds"]) * int(summary.setup["steps"])
    yield PLANNING_HEAD.format(steps=steps) + "\n"
    yield who(summary) + ".\n\n"
    yield markdown(
        ("load", "plan", "plan and commit"),
        (
            (
                case,
                f"**{summary.row('plan_us', case=case).tenths('.0f')}**",
                summary.row("step_us", case=case).tenths(".0f"),
            )
            for case in summary.cases()
        ),
    )


def services(summary: Summary) -> Iterable[str]:
    rate = summary.row("tokens_per_s")
    yield SERVICES_HEAD.format(tokens_per_s=rate.middle, rounds=rate.n or 0) + "\n"
    yield who(summary) + ".\n\n"
    yield markdown(
        ("service", "percent"),
        ((name, summary.row("percent", arm=name).span(".1f")) for name in summary.arms("percent")),
    )


def large_bodies(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield BODIES_HEAD.format_map(setup | {"most": setup["difference_ms_max"]}) + "\n"
    yield f"{who(summary)}; load average {summary.machine.load:g} at the end.\n\n"
    yield markdown(
        ("body", "MB", "status", "reply, ms", "p99 without", "p99 with", "longest", "difference"),
        (_body_cells(summary, case) for case in summary.cases()),
    )


def _body_cells(summary: Summary, case: str) -> Sequence[str]:
    def row(quantity: str, arm: str | None = None) -> Measurement:
        return summary.row(quantity, case=case, arm=arm)

    status = row("status")
    return (
        case,
        f"{row('size_bytes').middle / 1e6:.1f}",
        ", ".join(sorted({f"{each:.0f}" for each in status.by_round or (status.middle,)})),
        f"{row('reply_ms').middle:.0f}",
        f"{row('gap_p99_ms', 'without').middle:.0f}",
        f"{row('gap_p99_ms', 'with').middle:.0f}",
        f"{row('gap_max_ms', 'with').most:.0f}",
        f"**{row('difference_ms').middle:+.0f}**",
    )


def soaked(summary: Summary) -> Iterable[str]:
    yield SOAK_HEAD.format_map(
        summary.setup
        | {
            "left": _share(summary, "left"),
            "refused": _share(summary, "503", "overloaded", "deadline"),
        }
    )
    yield f"\n{who(summary)}.\n\n"
    left = (
        f"{name.removeprefix('antiphon_')} {summary.row('left', arm=name).middle:g}"
        for name in summary.arms("left")
    )
    grown = (
        f"{name} {summary.row('kib_per_minute', arm=name).middle / 1024:+.2f}"
        for name in summary.arms("kib_per_minute")
    )
    yield markdown(
        ("", ""),
        (
            ("left", ", ".join(left)),
            ("MiB a minute", ", ".join(grown)),
            ("found wrong", ", ".join(summary.notes) or "nothing"),
        ),
    )


def _share(summary: Summary, *ends: str) -> float:
    """The share of requests that ended in one of these ways."""
    outcomes = (
        (row.case.partition(": ")[2], row.middle)
        for row in summary.rows
        if row.quantity == "requests"
    )
    count = sum(n for way, n in outcomes if way.startswith(ends))
    return count / int(summary.setup["requests"])
