"""Graphs of steps of several sizes, captured before a worker is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.kernels.stream import Graph


class Captured(NamedTuple):
    """What capturing has cost."""

    sizes: tuple[int, ...]
    seconds: float
    size_bytes: int


def capture_each(
    sizes: Iterable[int],
    capture: Callable[[int], Graph],
    report: Callable[[int, int], None] | None = None,
) -> dict[int, Graph]:
    """Capture a graph of each size, and `report` how many of how many are done.

    The largest first: others find room in what it leaves. The result is by size, rising.
    """
    falling = sorted(set(sizes), reverse=True)
    graphs: dict[int, Graph] = {}
    with torch.inference_mode():
        for size in falling:
            graphs[size] = capture(size)
            if report is not None:
                report(len(graphs), len(falling))
    return dict(reversed(graphs.items()))
