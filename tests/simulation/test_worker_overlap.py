"""Steps launched ahead, steps that raise, and pauses: no request but the culprit notices."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.simulation.hash_runner import CursedRunner, HashRunner, answer_alone, both
from tests.support.reports import ProgressReader, new_ids
from tests.support.worker import error_of, limits, page_group, plain_runs

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import ForwardThread, InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import ControlCommand, Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Finish, RequestState
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    FlushCache,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import LogitProcessors, SamplingParams, ThinkingBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.model_worker.batching.state import Progress

VOCAB_SIZE = 60
EOS = 3
CURSE = 59
"""The token for which the runner raises."""


@dataclass
class Reported:
    prompt: list[int]
    tokens_max: int
    seed: int
    penalised: bool = False
    ids: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    finish: Finish | None = None
    dropped: bool = False


class Stage:
    """One loop, and a sender of what comes in."""

    def __init__(
        self,
        *,
        overlap: bool,
        pages: int,
        window: int | None,
        states: int,
        curse: int,
        **changes: Any,
    ) -> None:
        self.overlap, self.curse = overlap, curse
        groups = [page_group(pages)]
        if window is not None:
            groups.append(page_group(pages, GroupKind.WINDOW, window))
        if states:
            groups.append(page_group(states, GroupKind.STATE))
        self.windows = [group.window for group in groups]
        self.pools = CachePools(groups)
        self.limits = limits(
            step_tokens_max=48,
            chunk_tokens=20,
            running_max=8,
            context_tokens=min(120, self.pools.tokens_max),
            vocab_size=VOCAB_SIZE,
            end_ids=frozenset({EOS}),
            conservativeness=0.1,  # so that pages run out
            **changes,
        )
        self.batching = EngineCore(self.limits, self.pools, RadixIndex(self.pools))
        self.hashes = HashRunner(groups, VOCAB_SIZE)
        self.cursed = CursedRunner(self.hashes, curse)
        self.forward = ForwardThread(self.cursed)
        launcher = self.forward if overlap else InTurn(self.cursed)
        self.loop = BatchingLoop(
            self.batching, launcher, Mailbox(1), self.receive, ahead=int(overlap)
        )
        self.reported: dict[ChoiceKey, Reported] = {}
        self.done: list[ControlDone] = []
        self.reports: list[StepReport] = []
        self.progress: list[Progress] = []
        self._reader = ProgressReader()

    def run(self, prompt: list[int], tokens_max: int = 20, seed: int = 0) -> Reported:
        key, state = self.request(prompt, tokens_max, seed)
        self.turn(Mail(runs=plain_runs({key: state})))
        return self.reported[key]

    def run_all(self, prompts: list[list[int]], tokens_max: int = 20) -> None:
        """Send requests in one turn, each with its index as the seed."""
        self.turn(
            Mail(runs=plain_runs(self.request(p, tokens_max, i) for i, p in enumerate(prompts)))
        )

    def request(
        self,
        prompt: list[int],
        tokens_max: int = 20,
        seed: int = 0,
        processors: LogitProcessors = (),
    ) -> tuple[ChoiceKey, RequestState]:
        key = ChoiceKey(len(self.reported))
        self.reported[key] = Reported(prompt, tokens_max, seed)
        return key, RequestState(
            request_id=RequestId(f"r{key}"),
            choice=0,
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(max_new_tokens=tokens_max, seed=seed, processors=processors),
            deadline_unix_ms=0,
        )

    def order(self, *orders: ControlCommand) -> list[ControlDone]:
        self.done.clear()
        self.turn(Mail(commands=list(orders)))
        return self.done

    def turn(self, mail: Mail | None = None) -> None:
        self.receive(self.loop.turn(mail or Mail()))

    def receive(self, report: StepReport) -> None:
        self.reports.append(report)
        self.done += report.done
        for progress in self._reader.read(report.progress):
            self.progress.append(progress)
            reported = self.reported[progress.key]
            assert not reported.dropped, "a dropped choice was reported"
            assert reported.finish is None, "a choice went on after its end"
            reported.ids += new_ids(progress)
            reported.cached_tokens = progress.cached_tokens
            reported.finish = progress.finish

    def drain(self) -> None:
        for _ in range(10_000):
            if self.batching.idle:
                break
            self.turn()
        else:
            raise AssertionError("the requests do not end")
        self.turn()  # reads what is still in flight
        self.order(FlushCache())
        assert self.pools.used() == [0] * len(self.windows), "a page is lost"

    def expected(self, reported: Reported) -> tuple[list[int], FinishReason]:
        """What a choice answers, and how it ends, by itself alone and with the curse."""
        if self.curse in reported.prompt:
            return [], FinishReason.ERROR
        longest = min(reported.tokens_max, self.limits.context_tokens - len(reported.prompt))
        ids, reason = answer_alone(
            reported.prompt,
            longest,
            {EOS},
            VOCAB_SIZE,
            windows=self.windows,
            seed=reported.seed,
            counted=[] if reported.penalised else None,
        )
        cursed = ids.index(self.curse) + 1 if self.curse in ids else longest
        return (ids, reason) if cursed == longest else (ids[:cursed], FinishReason.ERROR)

    def finish(self) -> None:
        self.drain()
        self.verify()

    def verify(self) -> None:
        for reported in self.reported.values():
            ids, reason = self.expected(reported)
            if reported.dropped or (
                reported.finish and reported.finish.reason is FinishReason.ABORT
            ):
                assert reported.ids == ids[: len(reported.ids)]
                continue
            assert reported.finish is not None
            assert (reported.ids, reported.finish.reason) == (ids, reason)


@contextmanager
def staged(
    *,
    overlap: bool = True,
    pages: int = 64,
    window: int | None = None,
    states: int = 0,
    curse: int = CURSE,
    **changes: Any,
) -> Iterator[Stage]:
    stage = Stage(
        overlap=overlap, pages=pages, window=window, states=states, curse=curse, **changes
    )
    try:
        yield stage
    finally:
        stage.forward.close()


def harmless(length: int, salt: int) -> list[int]:
    return [4 + (salt * 7 + i) % 50 for i in range(length)]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with staged(overlap=request.param) as stage:
        yield stage


@pytest.mark.parametrize("position", range(7))
def test_a_step_that_raises_ends_only_the_request_that_is_to_blame(
    stage: Stage, position: int
) -> None:
    prompts = [harmless(5, salt) for salt in range(7)]
    prompts[position] = [*prompts[position][:4], CURSE]
    stage.run_all(prompts)
    stage.finish()
    culprit = stage.reported[ChoiceKey(position)]
    assert error_of(culprit.finish).code == "internal"


def test_several_culprits_in_one_step_are_all_found(stage: Stage) -> None:
    prompts = [[*harmless(4, salt), CURSE if salt % 3 == 0 else 9] for salt in range(8)]
    stage.run_all(prompts)
    stage.finish()
    assert stage.cursed.raised > 1


def test_a_culprit_that_is_dropped_in_flight_leaves_the_blame_to_no_other_request() -> None:
    with staged() as stage:
        stage.run_all([harmless(5, 1), [*harmless(4, 2), CURSE]])
        culprit = ChoiceKey(1)
        stage.reported[culprit].dropped = True
        stage.turn(Mail(drops={culprit: None}))
        stage.finish()
        assert stage.cursed.raised == 1
        assert stage.reported[ChoiceKey(0)].ids


def test_when_every_request_fails_every_request_ends() -> None:
    with staged(overlap=False) as stage:
        stage.turn(Mail(runs=plain_runs(stage.request([CURSE, i + 4]) for i in range(8))))
        stage.finish()
        assert stage.cursed.raised == 15  # a binary tree over eight


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    with staged() as stage:
        stage.run(harmless(9, 1), tokens_max=30)
        stage.run(harmless(30, 2), tokens_max=30)
        stage.finish()
        assert stage.hashes.futures > 0


def test_without_overlap_nothing_is_launched_ahead() -> None:
    with staged(overlap=False) as stage:
        stage.run(harmless(9, 1), tokens_max=30)
        stage.drain()
        assert stage.hashes.futures == 0


def test_what_ends_by_length_is_not_computed_beyond_it() -> None:
    rows: list[int] = []
    for overlap in (False, True):
        with staged(overlap=overlap) as stage:
            reported = [stage.run(harmless(6, salt), tokens_max=5, seed=salt) for salt in range(3)]
            stage.drain()
            assert all(t.finish and t.finish.reason is FinishReason.LENGTH for t in reported)
            rows.append(stage.hashes.rows)
    assert rows[0] == rows[1]


def test_whose_mask_depends_on_its_last_token_is_launched_ahead_nonetheless() -> None:
    with staged(curse=-1) as stage:
        budget = ThinkingBudget(tokens_max=1000, begin_id=1, closing_ids=(2,))
        key, state = stage.request(harmless(6, 1), 9, 1, (budget,))
        stage.turn(Mail(runs=plain_runs({key: state})))
        free = stage.run(harmless(6, 2), tokens_max=9, seed=2)
        stage.finish()
        answers = free.ids, stage.reported[key].ids
        assert stage.hashes.futures == sum(len(ids) - 1 for ids in answers) > 0


def test_a_budget_counts_the_same_tokens_with_steps_launched_ahead_and_without() -> None:
    masks: list[list[list[int]]] = []
    for overlap in (False, True):
        with staged(curse=-1, overlap=overlap) as stage:
            budget = ThinkingBudget(tokens_max=4, begin_id=1, closing_ids=(2,))
            key, state = stage.request([*harmless(6, 1), 1], 9, 1, (budget,))
            stage.turn(Mail(runs=plain_runs({key: state})))
            stage.drain()
            plans = [record.plan for record in stage.loop.recorder.records()]
            parts = [plan.part for plan in plans if plan.part is not None]
            made = [part.token_masks for part in parts if part.token_masks is not None]
            masks.append([mask.ravel().tolist() for mask in made])
    assert masks[0] == masks[1]
    assert len(masks[0]) > 5


def test_an_end_that_is_found_late_costs_one_row_and_no_token() -> None:
    seed = next(seed for seed in range(1000) if _stops(seed))
    rows: list[int] = []
    for overlap in (False, True):
        with staged(overlap=overlap) as stage:
            reported = stage.run(harmless(6, 0), tokens_max=40, seed=seed)
            stage.drain()
            assert reported.finish is not None
            assert reported.finish.reason is FinishReason.STOP
            stage.verify()
            rows.append(stage.hashes.rows)
    assert rows[1] == rows[0] + 1


def _stops(seed: int) -> bool:
    ids, reason = answer_alone(harmless(6, 0), 20, {EOS}, VOCAB_SIZE, seed=seed)
    return reason is FinishReason.STOP and CURSE not in ids and len(ids) > 2


def test_the_worlds_reach_retraction_with_steps_in_flight() -> None:
    with staged(pages=31) as stage:
        prompts = [harmless(20, salt) for salt in range(8)]
        stage.run_all(prompts, tokens_max=90)
        stage.finish()
        assert stage.batching.planner.retractions > 0
        assert stage.hashes.futures > 0


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_paused_loop_computes_nothing_and_then_goes_on(stage: Stage, mode: PauseMode) -> None:
    early = [stage.run(harmless(9, salt), tokens_max=30, seed=salt) for salt in range(3)]
    said = [reported.ids.copy() for reported in early]
    (done,) = stage.order(PauseWorker(mode=mode))
    assert done.requests == 3
    assert stage.reports[-1].paused
    rows = stage.hashes.rows
    late = stage.run(harmless(5, 7), tokens_max=4)
    stage.turn()
    assert stage.hashes.rows == rows
    assert not late.ids
    match mode:
        case PauseMode.ABORT:
            assert all(t.finish == Finish(reason=FinishReason.ABORT) for t in early)
        case PauseMode.RETRACT:
            assert not stage.batching.running
        case PauseMode.IN_PLACE:
            assert len(stage.batching.running) == 3
    stage.order(ContinueWorker())
    stage.finish()
    assert late.finish is not None
    assert all(t.ids[: len(before)] == before for t, before in zip(early, said, strict=True))


def test_what_retraction_freed_can_be_flushed_while_paused(stage: Stage) -> None:
    stage.run(harmless(30, 1), tokens_max=30)
    stage.turn()
    _, flushed = stage.order(PauseWorker(mode=PauseMode.RETRACT), FlushCache())
    assert flushed.pages_freed > 0
    assert stage.pools.used() == [0]
    stage.order(ContinueWorker())
    stage.finish()


def test_nothing_of_other_weights_is_ever_found_again(stage: Stage) -> None:
    prompt = harmless(45, 1)
    stage.run([*prompt, 5], tokens_max=2)
    answering = stage.run([*prompt, 6], tokens_max=40)
    while not answering.ids:
        stage.turn()
    assert answering.cached_tokens > 0
    (done,) = stage.order(SetWeightVersion(version="next", abort_all=False))
    assert done.requests >= 1
    assert stage.batching.limits.weight_version == "next"
    while answering.finish is None:
        stage.turn()
    # It has computed all of its answer, on pages of which some are older than the weights.
    after = stage.run(answering.prompt + answering.ids, tokens_max=2)
    assert after.cached_tokens == 0
    stage.finish()


def test_a_prompt_that_other_weights_have_begun_is_begun_again(stage: Stage) -> None:
    prompt = harmless(70, 1)
    reported = stage.run(prompt, tokens_max=2)
    stage.turn()
    assert not reported.ids
    stage.order(SetWeightVersion(version="next", abort_all=False))
    before = stage.hashes.tokens
    stage.finish()
    assert reported.cached_tokens == 0
    assert stage.hashes.tokens - before >= len(prompt) - 20  # one chunk went with the order


@both
@pytest.mark.parametrize("interval", [1, 7])
def test_each_token_is_reported_with_the_weights_that_sampled_it(
    overlap: bool, interval: int
) -> None:
    prompt = harmless(9, 1)
    with staged(overlap=overlap, stream_interval=interval, weight_version="first") as stage:
        each = (Reported(prompt, 40, seed) for seed in range(100))
        seed = next(one.seed for one in each if len(stage.expected(one)[0]) > 20)
        reported = stage.run(prompt, tokens_max=40, seed=seed)
        for _ in range(10):
            stage.turn()
        assert reported.finish is None
        (running,) = stage.batching.running.values()
        # What is under way is still theirs.
        before = running.outputs_count + stage.batching.batch.in_flight_tokens.item(running.slot)
        stage.order(SetWeightVersion(version="second", abort_all=False))
        stage.finish()
        counts = {"first": 0, "second": 0}
        for progress in stage.progress:
            counts[progress.weights] += progress.end - progress.start
        assert counts == {"first": before, "second": len(reported.ids) - before}


def test_text_goes_on_when_encoders_have_another_tower(stage: Stage) -> None:
    stage.run(harmless(9, 1), tokens_max=12)
    for _ in range(3):
        stage.turn()
    stage.turn(Mail(tower="next"))
    stage.run(harmless(9, 1), tokens_max=12)
    stage.finish()
    assert [each.cached_tokens for each in stage.reported.values()] == [0, 0]


def test_a_new_version_ends_everybody_unless_told_otherwise() -> None:
    with staged() as stage:
        running = stage.run(harmless(9, 1), tokens_max=30)
        (done,) = stage.order(SetWeightVersion(version="next"))
        assert done.requests == 1
        assert running.finish == Finish(reason=FinishReason.ABORT)


@both
@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_a_chunk_that_is_not_finite_ends_its_request_and_is_never_shared(
    overlap: bool, chunk: int
) -> None:
    prompt = harmless(70, 1)  # chunks of 20 tokens
    with staged(overlap=overlap, curse=-1) as stage:
        stage.hashes.poisoned = lambda plan, row: int(plan.kv_len[row]) == min(20 * chunk, 70)
        poisoned = stage.run(prompt, tokens_max=9)
        beside = stage.run(harmless(5, 9), tokens_max=9)
        while poisoned.finish is None:
            stage.turn()
        assert poisoned.finish.error is not None
        assert poisoned.finish.error.code == "internal"
        assert not poisoned.ids
        stage.turn()
        stage.hashes.poisoned = lambda _plan, _row: False
        again = stage.run(prompt, tokens_max=9)
        stage.drain()
        assert again.cached_tokens == 20 * (chunk - 1)
        assert (again.ids, beside.ids) == (stage.expected(again)[0], stage.expected(beside)[0])
