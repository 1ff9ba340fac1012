"""CPU time of a worker's steps outside the model: `python -m tests.bench.planning`.

Planning and committing with many running and many queued: a worker with all slots in use, as in
tests/bench/micro/bench_batching.py, where a new request follows each finished one. Expected: 3 us a
row to choose and lay out, whatever is queued; the target is 2 ms a step.

And a whole step, from choosing its rows to the encoded message, in one thread: see `StepWorker`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from tests.bench.micro.bench_batching import (
    END_ID,
    LOADS,
    PAGE_TOKENS,
    VOCAB_SIZE,
    FullWorker,
    engine_core,
    fake_outcome,
)
from tests.bench.summary import Measurement, arguments, here, measured, report, single
from tests.support.worker import GATEWAY, LEADER, WORKER, admit, page_group

from antiphon.model_worker.batching.loop import CAPACITY_PERIOD_S
from antiphon.model_worker.batching.plan_builder import build_plan
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.service.main import tune_gc
from antiphon.service.sequence import SeqSender
from antiphon.wire.codec import encode, pack_ids
from antiphon.wire.command import CommandBatch
from antiphon.wire.ids import ModelName
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.submit import OpenList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.plan import StepOutcome, StepPlan
    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.model_worker.batching.state import AnyProgress
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.wire.command import Admit
    from antiphon.wire.ids import RequestId

ROUNDS = 5
STEPS = 2_000
WARM_UP_STEPS = 200
STEP_S = 0.01
"""Duration of a step by the clock that the engine core sees: capacity is measured in each 50th."""
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 2 * (WARM_UP_STEPS + STEPS)
"""Of a request that does not end within the measurement."""
WINDOW_TOKENS = 64
FAR_MS = 2**52
LOADS_MEASURE = (
    "running, queued: to plan (plan_us), and to commit and measure the capacity (step_us), while a"
    " new request of 128 tokens follows each finished one"
)
CASES_MEASURE = (
    "decodes: to admit and plan (plan_us), to commit (step_us), and to make and encode the message"
    " to one detokenizer (message_us); the mean of the last, which counts what few steps do"
)
GREEDY = SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0)
PENALISED = SamplingParams(
    max_new_tokens=OUTPUT_TOKENS,
    temperature=0,
    frequency_penalty=0.5,
    details=TokenOutputParams(logprobs=True),
)


@dataclass(frozen=True)
class Case:
    """What `measures` says: so many requests decode, and all are sampled alike.

    Attributes:
        turnover: Whether one more request comes and one ends in each step.
        ahead: Whether a plan is launched before the outcome of the one before is committed.
        other: What some layers cache, where not all have full attention.
    """

    measures: str
    decodes: int
    turnover: bool = False
    ahead: bool = False
    sampling: SamplingParams = GREEDY
    other: GroupKind | None = None


CASES = {
    "1 decode": Case("one greedy decode, each step committed before the next is planned", 1),
    "16 decodes": Case("16 greedy decodes, each step committed before the next is planned", 16),
    "256 decodes": Case("256 greedy decodes, each step committed before the next is planned", 256),
    "256 decodes, ahead": Case(
        "256 greedy decodes, each step planned before the one before is committed", 256, ahead=True
    ),
    "256 decodes, ahead, penalty and logprob": Case(
        "the same with a frequency penalty and the logprob of the sampled token for each request",
        256,
        ahead=True,
        sampling=PENALISED,
    ),
    "256 decodes, states": Case(
        "256 greedy decodes of a model with recurrent states, of which one is cached every 256"
        " tokens; each step committed before the next is planned",
        256,
        other=GroupKind.STATE,
    ),
    "256 decodes, states, ahead": Case(
        "the same, each step planned before the one before is committed",
        256,
        ahead=True,
        other=GroupKind.STATE,
    ),
    "256 decodes, window": Case(
        "256 greedy decodes of a model with a window of 64 tokens in some layers; each step"
        " committed before the next is planned",
        256,
        other=GroupKind.WINDOW,
    ),
    "64 decodes, one comes, one ends": Case(
        "64 greedy decodes and a prompt of 16 tokens; in each step a request is admitted, and one"
        " ends; each step committed before the next is planned",
        64,
        turnover=True,
    ),
    "64 decodes, one comes, one ends, ahead": Case(
        "the same, each step planned before the one before is committed",
        64,
        turnover=True,
        ahead=True,
    ),
}


class LaunchedPlan(NamedTuple):
    plan: StepPlan
    rows: StepRows


class StepTimes(NamedTuple):
    """CPU time of a step in us, from its first command to the end of each of its parts.

    `plan`: to admit requests, choose rows and build the plan. `step`: to commit the outcome, take
    the progress and measure the capacity when it is due. `message`: to make and encode messages.
    """

    plan_us: float
    step_us: float
    message_us: float


class StepWorker:
    """The engine core and the output of a worker, in one thread, without model and bus.

    All requests go to one detokenizer, which reads columns. Not measured: the outcome, the making
    of commands, and that requests which have ended are forgotten.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        running, sampling = case.decodes, case.sampling
        if case.turnover:
            # With a request each step, so many run as one has output tokens; with a plan ahead, the
            # last one has its slot for a step longer.
            sampling = msgspec.structs.replace(sampling, max_new_tokens=case.decodes + 1)
            running += 2
        self.sampling = sampling
        context_tokens = 2 * PROMPT_TOKENS + sampling.max_new_tokens
        pages = running * (context_tokens // PAGE_TOKENS + 1)
        self.core = engine_core(running, pages, context_tokens, others=_others(case, pages))
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=running)
        self.random = np.random.default_rng(0)
        self.steps = 0
        self.messages: list[bytes] = []  # of the last step
        self._launched: LaunchedPlan | None = None
        self._capacity_due_s = 0.0
        self._admitted: deque[RequestId] = deque()
        self._requests = 0

    def timed_steps(self, count: int) -> Iterator[StepTimes]:
        """Yield the times of so many steps, after some to warm up."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        for _ in range(count):
            yield self.step()
            assert len(self.messages) == 1, "the rows of a step are in one message"

    def step(self) -> StepTimes:
        commands = self._commands()
        clock = time.thread_time_ns
        began = clock()
        self.steps += 1
        if commands is not None:
            self._admit(commands)
        previous, self._launched = self._launched, self._launch()
        if not self.case.ahead:
            previous, self._launched = self._launched, None
        planned = clock()
        outcome = None if previous is None else fake_outcome(previous.plan, self.random)
        resumed = clock()
        if previous is not None and outcome is not None:
            self._commit(previous, outcome)
        progress = self.core.take_progress()
        committed = clock()
        self._send(progress)
        sent = clock()
        self._forget_ended()
        plan_ns = planned - began
        return StepTimes(
            plan_ns / 1e3,
            (plan_ns + committed - resumed) / 1e3,
            (plan_ns + sent - resumed) / 1e3,
        )

    def _admit(self, commands: CommandBatch) -> None:
        for action in self.output.command(commands, now_ms=1):
            assert isinstance(action, RunChoice), "a request was refused"
            self.core.add(action.key, action.state, self.steps * STEP_S)

    def _launch(self) -> LaunchedPlan:
        rows = self.core.next_rows(self.steps * STEP_S)
        batch = self.core.batch
        plan = build_plan(self.steps, rows, batch, batch.part(rows))
        self.core.launched(plan.step)
        return LaunchedPlan(plan, rows)

    def _commit(self, launched: LaunchedPlan, outcome: StepOutcome) -> None:
        core, now = self.core, self.steps * STEP_S
        core.pools.finished(outcome.step)
        core.commit(launched.rows, outcome)
        if core.planner.take_started() or now >= self._capacity_due_s:
            self._capacity_due_s = now + CAPACITY_PERIOD_S
            core.capacity()

    def _send(self, progress: Sequence[AnyProgress]) -> None:
        self.output.step(self.steps, progress)
        self.messages = [encode(message) for _, message in self.output.take()]

    def _commands(self) -> CommandBatch | None:
        """The requests that come before the next step: all before the first, or one."""
        if not self.case.turnover and self.steps:
            return None
        admits: list[Admit] = []
        for _ in range(1 if self.case.turnover else self.case.decodes):
            number = self._requests = self._requests + 1
            # Else all would need their next page in the same step.
            more = 0 if self.case.turnover else number % PAGE_TOKENS
            prompt = self.random.integers(END_ID + 1, VOCAB_SIZE, PROMPT_TOKENS + more)
            command = admit(
                f"request-{number:032}",
                prompt_ids=pack_ids(prompt.tolist()),
                sampling=self.sampling,
                deadline_unix_ms=FAR_MS,
            )
            admits.append(command)
            self._admitted.append(command.request_id)
        return CommandBatch(
            leader=LEADER,
            worker=WORKER,
            seq=self._requests,
            commands=tuple(admits),
            not_after_unix_ms=FAR_MS,
        )

    def _forget_ended(self) -> None:
        """Forget a request that ended some steps ago, as its gateway lists it as closed."""
        if len(self._admitted) <= 2 * self.core.limits.running_max:
            return
        closed = OpenList(
            model=ModelName("model"),
            owner=GATEWAY,
            version=self.steps,
            whole=False,
            closed=(self._admitted.popleft(),),
            not_after_unix_ms=FAR_MS,
        )
        assert not self.output.open_list(closed, now_ms=1), "it had not ended"


def _others(case: Case, pages: int) -> Sequence[CacheGroup]:
    """The groups of the layers without full attention."""
    match case.other:
        case None:
            return ()
        case GroupKind.STATE:
            return (page_group(4 * case.decodes, GroupKind.STATE, page_tokens=PAGE_TOKENS),)
        case kind:
            return (page_group(pages, kind, WINDOW_TOKENS, PAGE_TOKENS),)


def measure(name: str, rounds: int, steps: int) -> list[Measurement]:
    """Time each step of workers with this load: planning it, and planning and committing it."""
    times = [each for _ in range(rounds) for each in FullWorker(LOADS[name][0]).timed_steps(steps)]
    plans, whole = zip(*times, strict=True)
    return [
        measured(quantity, np.round(values, 1).tolist(), case=name)
        for quantity, values in (("plan_us", plans), ("step_us", whole))
    ]


def measure_steps(name: str, rounds: int, steps: int) -> list[Measurement]:
    """Time each step of workers of this case, up to the end of each part: see `StepTimes`."""
    times = [each for _ in range(rounds) for each in StepWorker(CASES[name]).timed_steps(steps)]
    rows = [
        measured(quantity, np.round(values, 1).tolist(), case=name)
        for quantity, values in zip(StepTimes._fields, zip(*times, strict=True), strict=True)
    ]
    return [*rows, single("message_mean_us", fmean(each.message_us for each in times), case=name)]


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="planning.json").parse_args()
    tune_gc()  # as in a worker
    rows = [row for name in LOADS for row in measure(name, given.rounds, STEPS)]
    rows += [row for name in CASES for row in measure_steps(name, given.rounds, STEPS)]
    notes = [LOADS_MEASURE, CASES_MEASURE]
    notes += [f"{name}: {case.measures}" for name, case in CASES.items()]
    setup = {"rounds": given.rounds, "steps": STEPS}
    report(here("planning", setup, rows, notes=notes), given.json)


if __name__ == "__main__":
    main()
