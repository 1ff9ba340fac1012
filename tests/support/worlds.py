"""Seeds of the simulated worlds, which change with each commit, and the report of those that ran.

`pytest --world-seed FIRST --worlds COUNT` runs chosen worlds again.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

ROOT = Path(__file__).resolve().parents[2]
WORLDS = 300
PROPERTY = "world"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulated worlds of the batching loop")
    text = "first seed; default: the first six digits of the commit, 0 outside of git"
    group.addoption("--world-seed", type=int, metavar="FIRST", help=text)
    text = f"number of seeds; default: {WORLDS}"
    group.addoption("--worlds", type=int, metavar="COUNT", default=WORLDS, help=text)


def commit_seed(root: Path = ROOT) -> int:
    """The first seed of this commit; 0 in a source archive, or without git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(head.stdout[:6], 16)


def command(first: int, count: int = 1) -> str:
    """What runs these worlds again."""
    return (
        ".venv/bin/pytest tests/simulation/test_worker_worlds.py"
        f" --world-seed {first} --worlds {count}"
    )


@contextmanager
def reported(seed: int, kind: str, record_property: Callable[[str, Any], None]) -> Iterator[None]:
    """Record a world for the run's report; a failure says how to run the world again."""
    start, sound = time.process_time(), False
    try:
        yield
        sound = True
    except BaseException as error:
        error.add_note(f"world {seed} ({kind}); run it again with:\n  {command(seed)}")
        raise
    finally:
        record_property(PROPERTY, (seed, kind, time.process_time() - start, sound))


def write_summary(reporter: pytest.TerminalReporter) -> None:
    """How many worlds of which kind have run, their processor time, and which of them failed."""
    worlds: list[tuple[int, str, float, bool]] = [
        value
        for category in ("passed", "failed")
        for report in reporter.stats.get(category, [])
        for name, value in report.user_properties
        if name == PROPERTY and report.when == "call"
    ]
    if not worlds:
        return
    counts = Counter(kind for _, kind, _, _ in worlds)
    seconds: defaultdict[str, float] = defaultdict(float)
    for _, kind, world_s, _ in worlds:
        seconds[kind] += world_s
    total_s = sum(seconds.values())
    reporter.section(f"{len(worlds)} simulated worlds, {total_s:.0f} s of processor time", sep="-")
    for kind, count in counts.most_common():
        reporter.write_line(f"{count:6} {kind:32} {seconds[kind]:6.1f} s")
    first, last = min(worlds)[0], max(worlds)[0]
    reporter.write_line(f"again: {command(first, last - first + 1)}")
    for seed, kind, _, sound in worlds:
        if not sound:
            reporter.write_line(f"failed: {seed} ({kind}): {command(seed)}", red=True)
