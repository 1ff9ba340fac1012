"""Runs a model before the first request, and measures how it is best run."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

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
    from collections.abc import Generator

    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
    from antiphon.model_worker.startup.engine import Engine

log = logging.getLogger(__name__)

OVERLAP_PAIRS = 5
OVERLAP_STEPS = 24
OVERLAP_ROWS = (1, 16)
OVERLAP_GAIN_MIN = 1.02
"""What overlap must gain on average. The thread of the bus is idle meanwhile; in service it takes
its turns from both others: 135M models that gained up to a hundredth here lost three there."""
STEP_S_MAX = 0.02
"""Steps that take longer are run in turn: what can be saved is less than a hundredth of them, and
to measure that would take seconds. The very first step does not count: it takes ten times as long
as the others with a small model."""


def warm_up(
    loop: BatchingLoop, core: EngineCore | None = None, *, pools: bool = False
) -> StepReport:
    """Run a prefill and a decode step before the first request: the first of each kind is slow.

    A model that `pools` has prefill steps only. If the `core` drafts tokens, what steps cost is
    measured, too.

    Raises:
        CannotStart: The model does not run.
    """
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    if pools:
        sampling = SamplingParams(max_new_tokens=0, pool=PoolParams())
    report, _ = _run(loop, 1, sampling)
    if core is not None and core.speculation is not None:
        core.speculation.costs = costs = measure_steps(
            loop, core.speculation, core.limits.running_max
        )
        if costs is not None:
            log.info("step costs", extra={"tokens": costs.tokens, "seconds": costs.seconds})
    return msgspec.structs.replace(report, progress=())


def measure_steps(loop: BatchingLoop, speculation: Speculation, rows_max: int) -> StepCosts | None:
    """Measure what decode steps cost: of one row with drafts, and of many rows without.

    A size that does not come about is left out, and larger ones with it: there may be too few
    states for so many drafts, or prefills that are too small for so many rows to decode together.
    None if fewer than two sizes ran.

    Raises:
        CannotStart: The model does not run.
    """
    costs = dict[int, float]()
    with _fixed_drafts(speculation):
        for drafts in range(speculation.drafts_max + 1):
            speculation.fixed = drafts
            if (seconds := _step_seconds(loop, rows=1, tokens=1 + drafts)) is None:
                break
            costs[1 + drafts] = seconds
        speculation.fixed = 0
        rows = 2 * (1 + speculation.drafts_max)
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


def choose_overlap(loop: BatchingLoop, engine: Engine) -> ResolvedValue[bool]:
    """Let the loop launch steps ahead, in a thread for forward passes, if that proves faster.

    Runs decode steps in both ways in turn. The model has run before.

    Raises:
        CannotStart: The model does not run.
    """
    core, ratios = engine.core, dict[int, float]()
    forward, in_turn = engine.in_thread(), engine.in_turn()
    with _fixed_drafts(core.speculation):
        report, _ = _run(loop, 1, SamplingParams(max_new_tokens=2, ignore_eos=True))
        if report.seconds > STEP_S_MAX:
            return ResolvedValue(value=False, reason=f"a step takes {1e3 * report.seconds:.0f} ms")
        for rows in sorted({min(rows, core.limits.running_max) for rows in OVERLAP_ROWS}):
            seconds: tuple[list[float], list[float]] = [], []
            for _ in range(OVERLAP_PAIRS):
                loop.use(in_turn, ahead=0)
                seconds[0].append(_decode_seconds(loop, rows))
                loop.use(forward, ahead=1)
                seconds[1].append(_decode_seconds(loop, rows))
            ratios[rows] = median(seconds[0]) / median(seconds[1])
    faster = geometric_mean(ratios.values()) >= OVERLAP_GAIN_MIN
    if not faster:
        loop.use(in_turn, ahead=0)
        forward.close()
    speeds = ", ".join(f"{ratio:.2f} with {rows} rows" for rows, ratio in ratios.items())
    return ResolvedValue(value=faster, reason=f"its measured speed: {speeds}")


@contextmanager
def _fixed_drafts(speculation: Speculation | None) -> Generator[None]:
    """No drafts meanwhile, or as many as are set; what was verified is forgotten."""
    if speculation is None:
        yield
        return
    speculation.fixed = 0
    try:
        yield
    finally:
        speculation.fixed = None
        speculation.reset()


def _decode_seconds(loop: BatchingLoop, rows: int) -> float:
    """Duration of some decode steps, with the prefill before them."""
    sampling = SamplingParams(max_new_tokens=1 + OVERLAP_STEPS, ignore_eos=True)
    began = time.perf_counter()
    _run(loop, rows, sampling)
    return time.perf_counter() - began


MEASURED_STEPS = 5


def _step_seconds(loop: BatchingLoop, *, rows: int, tokens: int) -> float | None:
    """The shortest of some decode steps of so many rows and tokens; None if none ran."""
    outputs = (1 + MEASURED_STEPS) * (1 + tokens - rows) + 1
    sampling = SamplingParams(max_new_tokens=outputs, ignore_eos=True)
    _, reports = _run(loop, rows, sampling)
    steps = [r.seconds for r in reports if (r.rows, r.tokens, r.prefill_rows) == (rows, tokens, 0)]
    return min(steps, default=None)


def _run(
    loop: BatchingLoop, requests: int, sampling: SamplingParams
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
