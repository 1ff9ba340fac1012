"""Tables, and where something was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.figures import Machine
    from tests.bench.serving.device import Device


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def who(machine: Machine) -> str:
    return f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}"


def where(machine: Machine, device: Device) -> str:
    return (
        f"{who(machine)}; reads"
        f" {device.read_gb_s:.1f} GB/s, multiplies {device.product_gflop_s:.0f} GFLOP/s in bf16.\n"
    )
