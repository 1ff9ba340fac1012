"""CPU time of planning a step with many running and many queued: `python -m tests.bench.planning`.

A worker with all slots in use, as in tests/bench/micro/bench_batching.py: a new request follows
each finished one. Expected: 3 us a row to choose and lay out, whatever is queued; the target is
2 ms a step.
"""

from __future__ import annotations

import numpy as np
from tests.bench.micro.bench_batching import LOADS, FullWorker
from tests.bench.summary import Measurement, arguments, here, measured, report

ROUNDS = 5
STEPS = 2_000


def measure(name: str, rounds: int, steps: int) -> list[Measurement]:
    """Time each step of workers with this load: planning it, and planning and committing it."""
    times = [each for _ in range(rounds) for each in FullWorker(LOADS[name][0]).timed_steps(steps)]
    plans, whole = zip(*times, strict=True)
    return [
        measured(quantity, np.round(values, 1).tolist(), case=name)
        for quantity, values in (("plan_us", plans), ("step_us", whole))
    ]


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="planning.json").parse_args()
    rows = [row for name in LOADS for row in measure(name, given.rounds, STEPS)]
    report(here("planning", {"rounds": given.rounds, "steps": STEPS}, rows), given.json)


if __name__ == "__main__":
    main()
