"""Tables, and descriptions of machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Summary


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return rows((head, ["---"] * len(head), *body))


def rows(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def facts(summary: Summary, *lines: tuple[str, str]) -> str:
    """Return a table of names and values, which are formats of a summary's rows by quantity."""
    found = {row.quantity: row for row in reversed(summary.rows)}
    return markdown(("", ""), ((name, form.format_map(found)) for name, form in lines))


def machine_line(summary: Summary) -> str:
    machine = summary.machine
    return f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}"


def device_line(summary: Summary) -> str:
    device = summary.device
    assert device is not None, f"{summary.section}: the device was not measured"
    return (
        f"{machine_line(summary)}; memory"
        f" {device.read_gb_s:.1f} GB/s, matmul {device.product_gflop_s:.0f} GFLOP/s in bf16.\n"
    )
