"""Tables, and descriptions of machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return rows((head, ["---"] * len(head), *body))


def rows(body: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in body)


def lines(
    summary: Summary, *forms: str, by: Literal["case", "arm"] = "case", split: bool = False
) -> Iterable[Sequence[str]]:
    """Yield a line for each case, or for each arm: its name, and formats of its rows.

    A format names a row by its quantity, or by quantity and arm: `{step_ms torch:.2f}`. With
    `split`, each part of a name has a column of its own.
    """
    groups: dict[str, dict[str, Measurement]] = {}
    for row in summary.rows:
        group = groups.setdefault(row.case if by == "case" else row.arm, {})
        group.setdefault(row.quantity, row)
        group.setdefault(f"{row.quantity} {row.arm}", row)
    for name, found in groups.items():
        if name:
            names = name.split(", ") if split else [name]
            yield *names, *(form.format_map(found) for form in forms)


def facts(summary: Summary, *forms: tuple[str, str]) -> str:
    """Return a table of names and values, which are formats of a summary's rows by quantity."""
    found = {row.quantity: row for row in reversed(summary.rows)}
    return markdown(("", ""), ((name, form.format_map(found)) for name, form in forms))


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
