"""Collectives of ranks on one machine, over memory that they share.

A decode has two sums a layer, of a few kilobytes each. By sockets each of them wakes two threads on
every rank; here a rank writes its part, counts up, and reads the others' counts until they have
done the same, which takes some microseconds where each rank has a core.

Axes: R ranks.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.model_worker.ranks.ordered_sum import pieces, sum_in_order

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.model_worker.ranks.layout import RankLayout

SLOT_BYTES = 4 << 20
"""Size of what a rank exchanges at a time; larger tensors are exchanged in pieces."""
CONTROL_BYTES = 4 << 10
"""The same of the facts that ranks agree on."""
LINE_BYTES = 64
"""Each count has a cache line of its own."""
SPIN_S = 0.002
"""How long a rank reads counts before it lets other threads run, where each rank has a core."""
YIELD_S = 0.05
"""How long it only lets them run, before it sleeps: a rank that loads is awaited for long."""
SLEEP_S = 0.001
CHECK_READS = 256


def is_supported() -> bool:
    """Whether writes become visible to other processors in their order, as this module needs."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


class RanksEnded(Exception):
    """The ranks end: a collective is not completed."""


class Counts:
    """Counts that only grow, each written by one rank and read by others."""

    def __init__(self, memory: memoryview, ranks: int) -> None:
        """`ranks` are those that wait here: whether each has a core decides how."""
        self._counts = memory.cast("q")
        self._spin_s = SPIN_S if len(os.sched_getaffinity(0)) >= ranks else 0.0
        self._aborted = False

    def set(self, index: int, count: int) -> None:
        self._counts[index * (LINE_BYTES // 8)] = count

    def wait(self, index: int, count: int) -> None:
        """Wait until one of the counts is so high.

        Raises:
            RanksEnded: It was aborted.
        """
        counts, at = self._counts, index * (LINE_BYTES // 8)
        if counts[at] >= count:
            return
        began = time.perf_counter()
        while True:
            for _ in range(CHECK_READS):
                if counts[at] >= count:
                    return
            if self._aborted:
                raise RanksEnded
            waited_s = time.perf_counter() - began
            if waited_s > YIELD_S:
                time.sleep(SLEEP_S)
            elif waited_s > self._spin_s:
                os.sched_yield()

    def abort(self) -> None:
        """Fail whatever waits here or will. Any thread may call it."""
        self._aborted = True


class SharedMemoryGroup:
    """The ranks of one machine that share every layer: `antiphon.layers.weights.Tp`.

    Sums are computed by every rank in the order of ranks, so all have the same bits, which depend
    on nothing else in the tensor.

    Layout of its part of the memory: R counts of completed writes, then two sets of R slots, used
    in turn. A rank that writes to a set again has seen all others write to the other one, so they
    have read this one.
    """

    invariant = True

    def __init__(self, rank: int, memory: mmap.mmap, part: MemoryPart) -> None:
        self.rank, self.ranks = rank, part.ranks
        ranks = part.ranks
        self._slot_bytes = part.slot_bytes
        slots = part.start + ranks * LINE_BYTES
        self._counts = Counts(memoryview(memory)[part.start : slots], ranks)
        content = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = content[slots : part.end].view(2, ranks, part.slot_bytes)
        self._others = [each for each in range(ranks) if each != rank]
        self._count = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(x, self._slot_bytes, self._exchange)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        whole = [part.view(-1) for part in parts]
        start = 0
        for piece in pieces(x, self._slot_bytes):
            end = start + len(piece)
            for part, written in zip(whole, self._exchange(piece), strict=True):
                part[start:end] = written
            start = end
        return torch.cat(parts, dim=-1)

    def abort(self) -> None:
        """Fail the collectives of this rank, running and later ones. Any thread may call it."""
        self._counts.abort()

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """The pieces of all ranks, in their order, until the next but one exchange."""
        size = piece.nbytes
        slots = self._slots[self._count % 2, :, :size]
        slots[self.rank].view(piece.dtype).copy_(piece)
        self._count += 1
        self._counts.set(self.rank, self._count)
        for other in self._others:
            self._counts.wait(other, self._count)
        return [slot.view(piece.dtype) for slot in slots]


class SharedMemoryLink:
    """From one rank to another: a `Link`.

    Layout of its part of the memory: how many pieces were written, how many were read, and two
    slots, used in turn. So a sender is at most two pieces ahead.
    """

    def __init__(self, memory: mmap.mmap, part: MemoryPart, ranks: int) -> None:
        slots = part.start + 2 * LINE_BYTES
        self._counts = Counts(memoryview(memory)[part.start : slots], ranks)
        content = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = content[slots : slots + 2 * part.slot_bytes].view(2, part.slot_bytes)
        self._slot_bytes = part.slot_bytes
        self._count = 0

    def send(self, x: Tensor) -> None:
        for piece in pieces(x, self._slot_bytes):
            self._counts.wait(1, self._count - 1)
            self._slot(piece).copy_(piece)
            self._count += 1
            self._counts.set(0, self._count)

    def receive(self, out: Tensor) -> None:
        for piece in pieces(out, self._slot_bytes):
            self._counts.wait(0, self._count + 1)
            piece.copy_(self._slot(piece))
            self._count += 1
            self._counts.set(1, self._count)

    def abort(self) -> None:
        """Fail what waits here or will. Any thread may call it."""
        self._counts.abort()

    def _slot(self, piece: Tensor) -> Tensor:
        return self._slots[self._count % 2, : piece.nbytes].view(piece.dtype)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The part of the memory that so many ranks have."""

    start: int
    slot_bytes: int
    ranks: int

    @property
    def end(self) -> int:
        return self.start + self.ranks * (LINE_BYTES + 2 * self.slot_bytes)


class MemoryParts:
    """The parts of the memory of a worker.

    Attributes:
        control: Of the facts of all ranks.
        tensors: Of the sums of each stage.
        attention: Of the sums of each attention group.
        links: By the stage that sends, and the member of both stages.
    """

    def __init__(self, ranks: RankLayout) -> None:
        self.control = part = MemoryPart(0, CONTROL_BYTES, ranks.ranks)
        self.tensors = list[MemoryPart]()
        for _ in range(ranks.pp):
            self.tensors.append(part := MemoryPart(part.end, SLOT_BYTES, ranks.tp))
        self.attention = list[MemoryPart]()
        if ranks.dp > 1:
            for _ in range(ranks.dp):
                part = MemoryPart(part.end, SLOT_BYTES, ranks.attention_ranks)
                self.attention.append(part)
        self.links = dict[tuple[int, int], MemoryPart]()
        for stage in range(ranks.pp - 1):
            for member in range(ranks.tp):
                # Two counts and two slots, as one rank of two has them.
                part = MemoryPart(part.end, SLOT_BYTES, 2)
                self.links[stage, member] = part
        self.size = part.end


def create(parts: MemoryParts) -> tuple[mmap.mmap, str]:
    """Memory with these parts, and the path by which processes of this machine open it."""
    descriptor = os.memfd_create("antiphon-ranks")
    os.ftruncate(descriptor, parts.size)
    return mmap.mmap(descriptor, parts.size), f"/proc/{os.getpid()}/fd/{descriptor}"


def attach(path: str) -> mmap.mmap:
    """Open memory that another process has created, and is still holding.

    Raises:
        OSError: It is not there.
    """
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
