"""Runs a model before the first request, and measures how it is best run."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey, Progress, RequestState
from antiphon.model_worker.speculation.policy import Speculation, StepCosts
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.service.startup import CannotStart
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
    from antiphon.model_worker.batching.plan import Launcher
    from antiphon.model_worker.startup.engine import Engine

log = logging.getLogger(__name__)

OVERLAP_PAIRS = 5
OVERLAP_STEPS = 24
OVERLAP_ROWS = (1, 16)
OVERLAP_GAIN_MIN = 1.03
"""What overlap must gain on average. In service a gain is about as large as here, or 0 with many
rows, so that what noise has decided costs nothing."""
STEP_S_MAX = 0.02
"""Steps that take longer are run in turn: what can be saved is less than a hundredth of them, and
to measure that would take seconds. The very first step does not count: it takes ten times as long
as the others with a small model."""


def warm_up(loop: BatchingLoop[Any], engine: Engine) -> StepReport:
    """Run a prefill and a decode step before the first request: the first of each kind is slow.

    A model that pools has prefill steps only. If the engine drafts tokens, what steps cost is
    measured, too, but on the interpreter.

    Raises:
        CannotStart: The model does not run.
    """
    limits = engine.step_core.limits
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    if limits.pool_width is not None:
        sampling = SamplingParams(max_new_tokens=0, pool=PoolParams())
    report, _ = _run(loop, 1, sampling)
    if engine.speculations and not engine.interpreted:  # where it takes minutes
        costs = measure_steps(loop, engine.speculations, limits.running_max)
        for speculation in engine.speculations:
            speculation.costs = costs
        if costs is not None:
            log.info("step costs", extra={"tokens": costs.tokens, "seconds": costs.seconds})
    return msgspec.structs.replace(report, progress=())


def measure_steps(
    loop: BatchingLoop[Any], speculations: Sequence[Speculation], rows_max: int
) -> StepCosts | None:
    """Measure what decode steps cost: of one row with drafts, and of many rows without.

    A size that does not come about is left out, and larger ones with it: there may be too few
    states for so many drafts, or prefills that are too small for so many rows to decode together.
    None if fewer than two sizes ran.

    Raises:
        CannotStart: The model does not run.
    """
    costs = dict[int, float]()
    drafts_max = speculations[0].drafts_max
    with _fixed_drafts(speculations) as fix:
        for drafts in range(drafts_max + 1):
            fix(drafts)
            if (seconds := _step_seconds(loop, rows=1, tokens=1 + drafts)) is None:
                break
            costs[1 + drafts] = seconds
        fix(0)
        rows = 2 * (1 + drafts_max)
        while rows <= rows_max:
            if (seconds := _step_seconds(loop, rows=rows, tokens=rows)) is None:
                break
            costs[rows] = seconds
            rows *= 2
    if len(costs) < 2:  # what `StepCosts` needs
        return None
    # A longer step does not take less time: what says so is noise.
    rising = np.maximum.accumulate(list(costs.values())).tolist()
    return StepCosts(tuple(costs), tuple(rising))


def choose_overlap(loop: BatchingLoop[Any], engine: Engine) -> ResolvedValue[bool]:
    """Let the loop launch steps ahead, in a thread for forward passes, if that proves faster.

    Kernels then use all cores, or leave one to the loop. Runs decode steps in all ways in turn, but
    drops a way that is far behind. The model has run before.

    Raises:
        CannotStart: The model does not run.
    """
    with _fixed_drafts(engine.speculations):
        # The shortest of three: the other services start meanwhile.
        _, reports = _run(loop, 1, SamplingParams(max_new_tokens=4, ignore_eos=True))
        seconds = min(report.seconds for report in reports[1:])
        if seconds > STEP_S_MAX:
            return ResolvedValue(value=False, reason=f"a step takes {1e3 * seconds:.0f} ms")
        in_turn, ways = engine.in_turn(), {"": engine.in_thread()}
        if engine.resolved is not None and engine.resolved.threads.value > 1:
            ways[SHARED] = engine.in_thread(shared=True)
        speeds: dict[str, dict[int, float]] = {name: {} for name in ways}
        most = engine.step_core.limits.running_max
        for rows in sorted({min(rows, most) for rows in OVERLAP_ROWS}):
            for name, ratio in _overlap_speeds(loop, in_turn, ways, rows).items():
                speeds[name][rows] = ratio
    gains = {name: geometric_mean(ratios.values()) for name, ratios in speeds.items()}
    best, *others = sorted(ways, key=gains.__getitem__, reverse=True)
    faster = gains[best] >= OVERLAP_GAIN_MIN
    if faster:
        loop.use(ways.pop(best), ahead=1)
    else:
        loop.use(in_turn, ahead=0)
    for launcher in ways.values():
        launcher.close()
    said = (
        ", ".join(f"{ratio:.2f} with {rows} rows" for rows, ratio in speeds[name].items()) + name
        for name in (best, *others)
    )
    return ResolvedValue(value=faster, reason=f"its measured speed: {'; '.join(said)}")


SHARED = " with a core that the loop shares"
OVERLAP_DROPPED = 0.9
"""A way that is so much slower than steps in turn is not run again with as many rows."""


def _overlap_speeds(
    loop: BatchingLoop[Any], in_turn: Launcher, ways: Mapping[str, Launcher], rows: int
) -> dict[str, float]:
    """The speed of decode steps that are launched ahead in these ways, against steps in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    alone: list[float] = []
    for _ in range(OVERLAP_PAIRS):
        loop.use(in_turn, ahead=0)
        alone.append(_decode_seconds(loop, rows))
        for name, taken in seconds.items():
            if taken and alone[0] < OVERLAP_DROPPED * taken[0]:
                continue
            loop.use(ways[name], ahead=1)
            taken.append(_decode_seconds(loop, rows))
    return {name: median(alone) / median(taken) for name, taken in seconds.items()}


@contextmanager
def _fixed_drafts(speculations: Sequence[Speculation]) -> Generator[Callable[[int], None]]:
    """No drafts meanwhile, or as many as are set by what it yields; then, all is forgotten."""

    def fix(drafts: int) -> None:
        for speculation in speculations:
            speculation.fixed = drafts

    fix(0)
    try:
        yield fix
    finally:
        for speculation in speculations:
            speculation.fixed = None
            speculation.reset()


def _decode_seconds(loop: BatchingLoop[Any], rows: int) -> float:
    """Duration of some decode steps, with the prefill before them."""
    sampling = SamplingParams(max_new_tokens=1 + OVERLAP_STEPS, ignore_eos=True)
    began = time.perf_counter()
    _run(loop, rows, sampling)
    return time.perf_counter() - began


MEASURED_STEPS = 5


def _step_seconds(loop: BatchingLoop[Any], *, rows: int, tokens: int) -> float | None:
    """The shortest of some decode steps of so many rows and tokens; None if none ran."""
    outputs = (1 + MEASURED_STEPS) * (1 + tokens - rows) + 1
    sampling = SamplingParams(max_new_tokens=outputs, ignore_eos=True)
    _, reports = _run(loop, rows, sampling)
    steps = [r.seconds for r in reports if (r.rows, r.tokens, r.prefill_rows) == (rows, tokens, 0)]
    return min(steps, default=None)


def _run(
    loop: BatchingLoop[Any], requests: int, sampling: SamplingParams
) -> tuple[StepReport, list[StepReport]]:
    """Run requests of two tokens to their ends: the last report, and all."""
    state = RequestState(
        request_id=RequestId("warm-up"),
        choice=0,
        prompt_ids=pack_ids([0, 0]),
        sampling=sampling,
        deadline_unix_ms=0,
    )
    # `WorkerOutput` counts its keys from 1.
    mail = Mail(runs={ChoiceKey(-key): (state, None) for key in range(requests)})
    reports: list[StepReport] = []
    ended = 0
    while ended < requests:
        reports.append(loop.turn(mail))
        for news in reports[-1].progress:
            finish = news.finish if isinstance(news, Progress) else None
            if finish is not None and finish.error is not None:
                raise CannotStart(f"warmup failed: {finish.error.message}")
            ended += finish is not None
        mail = Mail()
    return reports[-1], reports
