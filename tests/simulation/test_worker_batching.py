"""Seeded worlds of the batching loop: random requests, drops and faults, checked at every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.simulation.hash_runner import HashRunner, next_token

from antiphon.model_worker.batching.admission import Limits
from antiphon.model_worker.batching.batching import Batching
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.request import ChoiceKey, Finish, Phase, RequestState
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.model_worker.cache.table import HOLE, CachePools
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Outcome, Plan

VOCAB_SIZE = 40
EOS = 3


class RunFailed(Exception):
    """What a kernel might raise."""


class FaultyRunner(HashRunner):
    """Fails a plan, or poisons a row, where the world says so."""

    fail = False

    def run(self, plan: Plan) -> Outcome:
        outcome = super().run(plan)
        if self.fail:
            raise RunFailed
        return outcome


@dataclass
class Told:
    """All that was said of one choice."""

    state: RequestState
    ids: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    dropped: bool = False


class World:
    """One worker's loop with random limits, and somebody who sends and drops requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        page_tokens = self.random.choice([1, 4, 16])
        groups = [self._group(GroupKind.FULL, page_tokens, None)]
        if self.random.random() < 0.5:
            groups.append(self._group(GroupKind.WINDOW, page_tokens, self.random.randint(1, 20)))
        self.groups = groups
        self.pools = CachePools(groups)
        self.limits = Limits(
            step_tokens_max=self.random.choice([1, 7, 32, 256]),
            chunk_tokens=self.random.choice([1, 5, 64]),
            running_max=self.random.choice([1, 3, 16]),
            context_tokens=min(self.pools.tokens_max, 96),
            vocab_size=VOCAB_SIZE,
            end_ids=frozenset({EOS}),
            weights_digest="w",
            headroom_tokens=self.random.choice([0, 4, 64]),
        )
        self.batching = Batching(self.limits, self.pools)
        self.runner = FaultyRunner(groups, VOCAB_SIZE, accepted_max=self.random.choice([1, 1, 3]))
        self.runner.poisoned = lambda _plan, _row: self.random.random() < self.poison
        self.loop = BatchingLoop(self.batching, self.runner, Mailbox(1), self.hear)
        self.told: dict[ChoiceKey, Told] = {}
        self.poison = 0.0
        self.failures = 0

    def _group(self, kind: GroupKind, page_tokens: int, window: int | None) -> CacheGroup:
        return CacheGroup(
            kind=kind,
            layers=(0,),
            page_bytes=1,
            page_tokens=page_tokens,
            pages_total=self.random.randint(64, 256) // page_tokens,
            window=window,
        )

    def act(self) -> None:
        """One turn: some new requests, some dropped ones, sometimes a fault."""
        live = [k for k, told in self.told.items() if told.finish is None and not told.dropped]
        runs = [self.new_request() for _ in range(self.random.choice([0, 0, 0, 1, 2]))]
        drops = frozenset(k for k in live if self.random.random() < 0.01)
        for key in drops:
            self.told[key].dropped = True
        self.poison = 0.2 if self.random.random() < 0.01 else 0.0
        self.runner.fail = self.random.random() < 0.003
        self.turn(Mail(runs=tuple(runs), drops=drops, flush=self.random.random() < 0.01))

    def turn(self, mail: Mail) -> None:
        self.hear(self.loop.turn(mail))
        self.check()

    def new_request(self) -> tuple[ChoiceKey, RequestState]:
        key = ChoiceKey(len(self.told))
        prompt = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(0, 100))]
        state = RequestState(
            request_id=RequestId(f"r{key}"),
            choice=self.random.randint(0, 2),
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(
                max_new_tokens=self.random.choice([0, 1, 5, 60, 10_000]),
                seed=self.random.randint(-9, 9),
                stop_token_ids=(7,) if self.random.random() < 0.2 else (),
                ignore_eos=self.random.random() < 0.7,
            ),
            deadline_unix_ms=0,
        )
        self.told[key] = Told(state)
        return key, state

    def hear(self, report: StepReport) -> None:
        for progress in report.progress:
            told = self.told[progress.key]
            assert not told.dropped, "a dropped choice was heard of"
            assert told.finish is None, "a choice ended twice, or went on after its end"
            told.ids += unpack_ids(progress.token_ids)
            told.finish = progress.finish

    def check(self) -> None:
        """The invariants that hold between any two steps."""
        tables = [request.table for request in self.batching.running.values()]
        for index, pool in enumerate(self.pools.pools):
            listed = [p for table in tables if table for p in table.pages(index) if p != HOLE]
            assert len(listed) == len(set(listed)) == pool.used_count, "a page is lost or shared"
            assert pool.free_count + len(listed) == pool.total
        assert all(r.phase is Phase.RUNNING for r in self.batching.running.values())
        assert len(self.batching.running) <= self.limits.running_max
        live = [t for t in self.told.values() if t.finish is None and not t.dropped]
        assert len(live) == len(self.batching.running) + len(self.batching.waiting)

    def drain(self) -> None:
        self.poison, self.runner.fail = 0.0, False
        for _ in range(100_000):
            if self.batching.idle:
                return
            self.turn(Mail(runs=(), drops=frozenset(), flush=False))
        raise AssertionError("the requests do not end")

    def alone(self, state: RequestState) -> tuple[list[int], FinishReason]:
        """What the choice says when nobody else is there."""
        prompt = list(unpack_ids(state.prompt_ids))
        said: list[int] = []
        longest = min(state.sampling.max_new_tokens, self.limits.context_tokens - len(prompt))
        ends = {EOS, *state.sampling.stop_token_ids} if not state.sampling.ignore_eos else set()
        windows = [group.window for group in self.groups]
        while len(said) < longest:
            sampling = state.sampling
            context = prompt + said
            token = next_token(context, windows, sampling.seed, state.choice, VOCAB_SIZE)
            if token in ends:
                return said, FinishReason.STOP
            said.append(token)
        return said, FinishReason.LENGTH

    def verify(self, told: Told) -> None:
        """What was said is what the choice says alone, or a beginning of it where a fault hit."""
        prompt_tokens = len(told.state.prompt_ids) // 4
        least = min(told.state.sampling.max_new_tokens, 1)
        if not prompt_tokens or prompt_tokens + least > self.limits.context_tokens:
            assert told.dropped or (told.finish and told.finish.error is not None)
            assert not told.ids
            return
        ids, reason = self.alone(told.state)
        if told.dropped or (told.finish and told.finish.reason is FinishReason.ERROR):
            assert told.ids == ids[: len(told.ids)]
            return
        assert told.finish is not None
        assert (told.ids, told.finish.reason) == (ids, reason)


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_says_what_it_says_alone_and_leaves_nothing(seed: int) -> None:
    world = World(seed)
    for _ in range(200):
        world.act()
    world.drain()
    assert world.pools.used() == [0] * len(world.groups)
    assert len(world.told) > 50
    for told in world.told.values():
        world.verify(told)


def test_the_worlds_reach_retraction_faults_and_ends_of_every_kind() -> None:
    reasons: set[str] = set()
    retractions = 0
    for seed in range(10):
        world = World(seed)
        for _ in range(200):
            world.act()
        retractions += world.batching.retractions
        for told in world.told.values():
            if told.finish is not None:
                error = told.finish.error
                reasons.add(error.code if error else str(told.finish.reason))
    assert retractions > 0
    assert reasons == {"stop", "length", "internal", "invalid_request", "prompt_too_long"}


def test_a_request_moved_at_any_token_goes_on_as_if_it_had_stayed() -> None:
    world = World(5)
    key, state = world.new_request()
    sampling = SamplingParams(max_new_tokens=30, seed=4, ignore_eos=True)
    state = msgspec.structs.replace(state, prompt_ids=pack_ids([5, 6, 7]), sampling=sampling)
    whole, _ = world.alone(state)
    for moved_at in range(1, 30):
        moved = msgspec.structs.replace(
            state, output_ids=pack_ids(whole[:moved_at]), emitted=moved_at, weights_digest="w"
        )
        moved = msgspec.msgpack.decode(msgspec.msgpack.encode(moved), type=RequestState)
        world.told[key] = Told(moved, ids=whole[:moved_at])
        world.turn(Mail(runs=((key, moved),), drops=frozenset(), flush=False))
        world.drain()
        assert world.told[key].ids == whole


def test_the_state_of_a_running_request_is_all_that_it_takes() -> None:
    world = World(5)
    state = RequestState(
        request_id=RequestId("r"),
        choice=1,
        prompt_ids=pack_ids([1, 2, 3]),
        sampling=SamplingParams(max_new_tokens=9, ignore_eos=True),
        deadline_unix_ms=5,
    )
    key = ChoiceKey(0)
    world.told[key] = Told(state)
    world.turn(Mail(runs=((key, state),), drops=frozenset(), flush=False))
    (request,) = world.batching.running.values()
    world.turn(Mail(runs=(), drops=frozenset(), flush=False))
    snapshot = request.snapshot()
    assert list(unpack_ids(snapshot.output_ids)) == world.told[key].ids
    assert snapshot.emitted == len(world.told[key].ids)
    assert msgspec.structs.replace(snapshot, output_ids=b"", emitted=0, weights_digest="") == state


def test_pages_are_int32_and_rows_carry_only_their_own() -> None:
    plans: list[Plan] = []
    world = World(3)
    run = world.runner.run
    world.runner.run = lambda plan: (plans.append(plan), run(plan))[1]  # type: ignore[method-assign]
    for _ in range(50):
        world.act()
    assert plans
    for plan in plans:
        arrays = [plan.slot, plan.tokens, plan.positions, plan.logit_tokens, *plan.page_tables]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        assert len(set(plan.slot.tolist())) == len(plan.slot)
        assert plan.query_len.sum() == len(plan.tokens) <= world.limits.step_tokens_max
        assert plan.query_len.max() <= world.limits.chunk_tokens
