"""The sections of all services together: what they take, and what minutes of load leave behind."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.bench import bodies, planning
from tests.bench.page.markdown import markdown, who

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.__main__ import Report
    from tests.bench.soak import Result

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


def planned(report: planning.Report) -> Iterable[str]:
    yield PLANNING_HEAD.format(steps=report.rounds * report.steps) + "\n"
    yield who(report.machine) + ".\n\n"
    yield markdown(
        ("load", "plan", "plan and commit"),
        (
            (line.load, f"**{planning.told(line.plan_us)}**", planning.told(line.step_us))
            for line in report.loads
        ),
    )


def services(report: Report) -> Iterable[str]:
    rounds = report.services_cpu
    rate = median(result.tokens_per_s for result in rounds)
    yield SERVICES_HEAD.format(tokens_per_s=rate, rounds=len(rounds)) + "\n"
    yield who(report.machine) + ".\n\n"
    names = list(rounds[0].services_percent)
    lines = [(name, [result.services_percent[name] for result in rounds]) for name in names]
    lines.append(("all", [result.total_percent for result in rounds]))
    yield markdown(
        ("service", "percent"),
        (
            (name, f"{median(shares):.1f} ({min(shares):.1f}-{max(shares):.1f})")
            for name, shares in lines
        ),
    )


def large_bodies(report: bodies.Report) -> Iterable[str]:
    rounds = max(len(case.pairs) for case in report.cases)
    yield (
        BODIES_HEAD.format(streams=report.streams, rounds=rounds, most=bodies.DIFFERENCE_MS_MAX)
        + "\n"
    )
    load = report.machine.load
    yield f"{who(report.machine)}; load average {load:g} at the end.\n\n"
    yield markdown(
        ("body", "MB", "status", "reply, ms", "p99 without", "p99 with", "longest", "difference"),
        (
            (
                f"{case.name}, `{case.path}`",
                f"{case.size_bytes / 1e6:.1f}",
                ", ".join(sorted({str(pair.status) for pair in case.pairs})),
                f"{median(pair.reply_ms for pair in case.pairs):.0f}",
                f"{median(pair.quiet_ms for pair in case.pairs):.0f}",
                f"{median(pair.loud_ms for pair in case.pairs):.0f}",
                f"{max(pair.longest_ms for pair in case.pairs):.0f}",
                f"**{case.difference_ms:+.0f}**",
            )
            for case in report.cases
        ),
    )


def soaked(result: Result) -> Iterable[str]:
    yield SOAK_HEAD.format(
        requests=result.requests,
        minutes=result.minutes,
        left=_share(result, "left"),
        refused=_share(result, "503", "overloaded", "deadline"),
        retractions=result.retractions,
    )
    yield f"\n{who(result.machine)}.\n\n"
    left = ", ".join(f"{name.removeprefix('antiphon_')} {n:g}" for name, n in result.left.items())
    grown = {name: growth.kib_per_minute / 1024 for name, growth in result.growth.items()}
    yield markdown(
        ("", ""),
        (
            ("left", left),
            ("MiB a minute", ", ".join(f"{name} {mib:+.2f}" for name, mib in grown.items())),
            ("found wrong", ", ".join(result.failures) or "nothing"),
        ),
    )


def _share(result: Result, *ends: str) -> float:
    """The share of requests that ended in one of these ways."""
    ways = ((name.partition(": ")[2], n) for name, n in result.outcomes.items())
    return sum(n for way, n in ways if way.startswith(ends)) / result.requests
