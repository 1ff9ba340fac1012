"""Wait for an idle machine: engines with two threads collapse when one other process runs.

A run starts only on an idle machine, and the CPU use of other processes during it is recorded
beside the result, so that a disturbed run is detected and repeated.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

T = TypeVar("T")

WATCH_S = 2.0
BUSY_MAX = 0.05
"""Share of all cores that others may use; a whole core of two would be 0.5."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Busy(Exception):
    """Other processes use the CPU; the message names the busiest."""


@dataclass(frozen=True)
class Work:
    """CPU seconds since boot: of all processes, stolen time included, and of the given ones."""

    at_s: float
    machine_s: float
    ours_s: float

    def others_since(self, before: Work) -> float:
        """Return the share of all cores that was used since, and not by us."""
        others_s = (self.machine_s - before.machine_s) - (self.ours_s - before.ours_s)
        return max(0.0, others_s) / ((self.at_s - before.at_s) * (os.cpu_count() or 1))


def work(ours: Iterable[int]) -> Work:
    """Read the clocks; `ours` are processes that do not count as others, with descendants."""
    return Work(time.monotonic(), _machine_s(), _tree_s(set(ours)))


async def watched(playing: Awaitable[T], *ours: int) -> tuple[T, float]:
    """Await a result; return it with the share of all cores that others used meanwhile."""
    own = [os.getpid(), *ours]
    before = work(own)
    result = await playing
    return result, work(own).others_since(before)


def wait_until_quiet(timeout_s: float, ours: Iterable[int] = ()) -> None:
    """Return once no process uses the CPU but this one, `ours` and their descendants. Blocks.

    Raises:
        Busy: The machine was not idle in time.
    """
    own = [os.getpid(), *ours]
    deadline_s = time.monotonic() + timeout_s
    while True:
        before, used = work(own), used_s()
        time.sleep(WATCH_S)
        share = work(own).others_since(before)
        if share <= BUSY_MAX:
            return
        if time.monotonic() >= deadline_s:
            raise Busy(f"others use {share:.0%} of the cores: {_busiest(used)}")


def _machine_s() -> float:
    """User, nice, system, interrupts and what was stolen; not idle, not guests (in user)."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return _TICK_S * (sum(ticks[:3]) + sum(ticks[5:8]))


def _tree_s(roots: set[int]) -> float:
    """CPU time of processes and their descendants, those that have ended included."""
    listed = list(_processes())
    parents = {pid: parent for pid, parent, _, _ in listed}
    return sum(
        own_s + waited_s for pid, _, own_s, waited_s in listed if _descends(pid, roots, parents)
    )


def _descends(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False


def _processes() -> Iterable[tuple[int, int, float, float]]:
    """Yield (pid, parent, CPU seconds of its own, those of ended children it has waited for)."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            own, waited = (sum(map(int, fields[n : n + 2])) for n in (11, 13))
            yield int(folder.name), int(fields[1]), _TICK_S * own, _TICK_S * waited


def used_s() -> dict[int, float]:
    """Return the CPU seconds of every process, without its children."""
    return {pid: own_s for pid, _, own_s, _ in _processes()}


def _busiest(before: dict[int, float]) -> str:
    used = {pid: each - before.get(pid, 0.0) for pid, each in used_s().items()}
    most = sorted(used.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{_command(pid)} ({pid}): {each:.1f} s" for pid, each in most)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:60].strip()
    except OSError:
        return "?"
