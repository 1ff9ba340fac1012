"""What FlashInfer's wrappers have in common: pages of rows, memory, and which rows have a wrapper.

A wrapper has memory of its host and of the device that its plan goes through: it is copied when the
device gets there. The device may be steps behind, and a wrapper that is planned again would
overwrite what is yet to be copied: it belongs to the rows that it was planned for until they are
dropped, and their step was read then.

Axes: R rows, N pages of all rows.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata

    Ints = NDArray[np.int32]

WORKSPACE_BYTES = 128 << 20
"""For parts of rows, as FlashInfer recommends: it splits rows into as many tiles of 128 queries as
run at a time, two a processor, whose results in float32 need 17 MB with 132 processors, and those
of latents 35 MB. Releases before its pull request 5177 took more, up to 512 MB, and raised where
there were less: https://github.com/vllm-project/vllm/issues/40023."""
WRAPPER_BYTES = 8 << 20
"""Of the device, which a wrapper allocates for its plan."""
STEP_WRAPPERS = 12
"""Of steps that are launched one by one: decodes and prefills of two kinds of layers, in the step
that is planned and in two before it."""
STEP_BYTES = WORKSPACE_BYTES + STEP_WRAPPERS * WRAPPER_BYTES
"""Of the device, beside captured steps."""


class Wrapper(Protocol):
    """A wrapper of FlashInfer, which computes what it was planned for."""

    plan: Any
    run: Any


class RowPages(NamedTuple):
    """Pages of rows as wrappers take them, without those that lie before the windows of a row."""

    starts: Ints  # (R + 1,) the first page of each row in `pages`
    pages: Ints  # (N,)
    last_tokens: Ints  # (R,) tokens in the last page of each row

    @classmethod
    def of(cls, rows: AttentionMetadata) -> RowPages:
        """The pages of rows.

        Raises:
            RuntimeError: A row reads or writes a token that has no page.
        """
        table, query_len, kv_len = rows.page_table, rows.query_len, rows.kv_len
        size, window = rows.shape.page_tokens, rows.shape.window
        first = np.zeros_like(kv_len)
        if window is not None:
            first = np.maximum(kv_len - query_len + 1 - window, 0) // size
        counts = -(-kv_len // size) - first
        starts = row_starts(counts)
        row = np.repeat(np.arange(len(kv_len)), counts)
        column = np.arange(len(row)) - np.repeat(starts[:-1] - first, counts)
        inside = (column < table.shape[1]).all()
        if not inside or (pages := table[row, column]).min(initial=0) < 0:
            raise RuntimeError("a row reads or writes a token that has no page")
        return cls(starts, pages, kv_len - (first + counts - 1) * size)


def row_starts(counts: Ints) -> Ints:
    """Where each row begins, and where the last one ends: (R,)  ->  (R + 1,)."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


class WrapperLease:
    """A wrapper that rows have until they are dropped."""

    def __init__(self, wrapper: Wrapper, free: list[Wrapper]) -> None:
        self.wrapper = wrapper
        weakref.finalize(self, free.append, wrapper)


def on_host(values: Ints, device: torch.device) -> Tensor:
    """An array that a wrapper reads now, and the device copies while the host goes on."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@cache
def free_wrappers(device: torch.device, kind: Hashable) -> list[Wrapper]:
    """Wrappers of a kind that no rows have."""
    return []


@cache
def workspace(device: torch.device) -> Tensor:
    """The memory for parts of rows, which all wrappers share: one runs after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


_GRAPH_MEMORY: dict[tuple[Hashable, int], Tensor] = {}


def graph_memory(params: Hashable, place: int, count: int, device: torch.device) -> Tensor:
    """The first numbers of those that graphs of all sizes read; a larger graph gets others."""
    found = _GRAPH_MEMORY.get((params, place))
    if found is None or len(found) < count:
        found = torch.zeros(count, dtype=torch.int32, device=device)
        _GRAPH_MEMORY[params, place] = found
    return found[:count]


@cache
def sm_of(device: torch.device) -> int | None:
    """The compute capability without its point; None: of a device that has none."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
