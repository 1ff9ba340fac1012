"""A gateway under a sampling profiler, from SIGUSR1 to SIGUSR2, which writes the samples.

The file is beside its settings: `python -m tests.bench.crowd.profiled_gateway --config FILE ...`.
The timer counts the process's own time, so idling and the neighbours' work are not in it, and an
interrupt every few milliseconds costs nothing that shows. What a built-in function does counts for
the Python function that called it; what is done with no Python function running is the event
loop's own, the kernel's reading and writing of sockets included.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.service import GatewayService
from antiphon.service.main import run

if TYPE_CHECKING:
    from types import FrameType

FILE = "samples.json"
PERIOD_S = 0.002
TOP = 20

Parts = tuple[tuple[str, tuple[str, ...]], ...]


class Samples(msgspec.Struct, frozen=True):
    """How often each function was found at work, by file and name."""

    found: dict[str, int]

    def shares(self, parts: Parts, rest: str) -> dict[str, float]:
        counts = Counter[str]()
        for place, count in self.found.items():
            file = place.partition(":")[0]
            names = (name for name, patterns in parts if any(each in file for each in patterns))
            counts[next(names, rest)] += count
        return _percent(counts)

    def top(self) -> dict[str, float]:
        """Percent of all samples of those functions that were found most."""
        shares = _percent(Counter(self.found))
        return dict(list(shares.items())[:TOP])


class Sampler:
    """Takes samples of this process's main thread from `start` to `stop`."""

    def __init__(self) -> None:
        self._found = Counter[str]()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def stop(self) -> Samples:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Samples(dict(self._found))

    def _take(self, _: int, frame: FrameType | None) -> None:
        if frame is not None:
            code = frame.f_code
            self._found[f"{_short(code.co_filename)}:{code.co_qualname}"] += 1


def write(samples: Samples, file: Path) -> None:
    """Write the samples atomically: a reader that waits for the file finds all of it."""
    beginning = file.with_suffix(".part")
    beginning.write_bytes(msgspec.json.encode(samples))
    beginning.rename(file)


def read(file: Path) -> Samples:
    return msgspec.json.decode(file.read_bytes(), type=Samples)


def _short(file: str) -> str:
    """Return a path from its package on, whatever the installation folder."""
    for root in ("site-packages/", "services/", "shared/", "python3"):
        _, found, rest = file.rpartition(root)
        if found:
            return rest
    return file


def _percent(counts: Counter[str]) -> dict[str, float]:
    total = max(1, counts.total())
    return {name: round(100 * count / total, 1) for name, count in counts.most_common()}


def main() -> None:
    file = Path(sys.argv[sys.argv.index("--config") + 1]).parent / FILE
    sampler = Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: sampler.start())
    signal.signal(signal.SIGUSR2, lambda *_: write(sampler.stop(), file))
    run(GatewayService)


if __name__ == "__main__":
    main()
