"""Tables, and where something was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Summary


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return rows((head, ["---"] * len(head), *body))


def rows(lines: Iterable[Sequence[str]]) -> str:
    """Return lines of a table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def who(summary: Summary) -> str:
    machine = summary.machine
    return f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}"


def where(summary: Summary) -> str:
    device = summary.device
    assert device is not None, f"{summary.section}: what the machine can do was not measured"
    return (
        f"{who(summary)}; reads"
        f" {device.read_gb_s:.1f} GB/s, multiplies {device.product_gflop_s:.0f} GFLOP/s in bf16.\n"
    )
