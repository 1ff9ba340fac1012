"""Choices with a grammar among choices without: seeded worlds with few pages, drops and moves."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.simulation.batching_world import EOS, VOCAB_SIZE, WorldRunner
from tests.simulation.hash_runner import both, next_token
from tests.support.matchers import advance_inline
from tests.support.reports import ProgressReader, new_ids
from tests.support.worker import limits, page_group

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Finish, RequestState
from antiphon.model_worker.batching.token_masks import pack
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.grammar.executor import MatcherExecutor, MatcherTask
from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import ContinueWorker, PauseMode, PauseWorker
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints, StepPlan
    from antiphon.model_worker.batching.request import Request

AFTER = (7, 8)
"""What a deferred grammar begins after."""


class ToyState:
    """A grammar by hashing: from 1 to 6 tokens may come, and sometimes the end, or only that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ids: list[int] = []

    @property
    def terminated(self) -> bool:
        return self.ids[-1:] == [EOS]

    def allowed(self) -> list[int]:
        if self.name == "barren" and len(self.ids) == 5:
            return []
        digest = blake2b(f"{self.name}{self.ids}".encode(), digest_size=8).digest()
        if len(self.ids) > 2 and digest[0] % 16 == 0:
            return [EOS]
        others = {id_ % VOCAB_SIZE for id_ in digest[2 : 3 + digest[1] % 6]} - {EOS}
        return sorted(others | ({EOS} if digest[0] % 16 < 3 else {11}))

    def accept(self, token: int) -> bool:
        assert self.name != "faulty" or not self.ids, "a bug, on purpose"
        if self.terminated or token not in self.allowed():
            return False
        self.ids.append(token)
        return True

    def fill(self, words: Ints) -> bool:
        allowed = self.allowed()
        if not allowed:
            raise InvalidRequest("grammar: no token may come next")
        words[:] = pack(np.isin(np.arange(VOCAB_SIZE), allowed))
        return True

    def rollback(self, tokens: int) -> None:
        del self.ids[len(self.ids) - tokens :]


def guide_of(state: RequestState) -> GrammarMatcher | None:
    """As a worker makes it: from the grammar and the answer so far."""
    grammar = state.sampling.grammar
    if grammar is None:
        return None
    toy = ToyState(grammar.text)
    place = DeferredGrammarState(toy, grammar.begins_after) if grammar.begins_after else toy
    assert all(place.accept(token) for token in unpack_ids(state.output_ids))
    return GrammarMatcher(place, VOCAB_SIZE, frozenset({EOS}))


def steered(drawn: int, words: Ints | None) -> int:
    """What a row draws that would have drawn this: the first allowed token from there on."""
    if words is None:
        return drawn
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    ids = np.flatnonzero(bits)
    return int(ids[np.argmin((ids - drawn) % VOCAB_SIZE)])


class MaskedRunner(WorldRunner):
    """Draws what the masks of the plan leave."""

    def _next(self, plan: StepPlan, row: int, logit: int, context: Ints, drafts: int) -> int:
        drawn = super()._next(plan, row, logit, context, drafts)
        part = plan.part
        if part is None or part.token_masks is None or part.token_mask_logits is None:
            return drawn
        index = np.flatnonzero(part.token_mask_logits == logit)
        return steered(drawn, part.token_masks[index[0]] if len(index) else None)


def alone(state: RequestState) -> tuple[list[int], FinishReason, str | None]:
    """What a choice says when it is alone, how it ends, and with which error."""
    prompt, said = list(unpack_ids(state.prompt_ids)), list[int]()
    guide, sampling = guide_of(state), state.sampling
    while len(said) < sampling.max_new_tokens:
        drawn = next_token([*prompt, *said], [None], sampling.seed, state.choice, VOCAB_SIZE)
        token = steered(drawn, None if guide is None else guide.masks[0])
        if guide is not None and (finish := guide.accept_token(token)) is not None:
            return said, finish.reason, None if finish.error is None else finish.error.code
        if token == EOS and not sampling.ignore_eos:
            return said, FinishReason.STOP, None
        said.append(token)
    return said, FinishReason.LENGTH, None


class SlowMatcherExecutor(MatcherExecutor):
    """Follows some guides at once, and others steps later, in any order."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.waiting: list[MatcherTask] = []
        self.late = 0

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        self.waiting += tasks
        self.dice.shuffle(self.waiting)
        self._run(self.dice.randint(0, len(self.waiting)))
        self.late += len(self.waiting)

    def wait(self) -> None:
        self._run(1)

    def cancel(self, task: MatcherTask) -> None:
        if task in self.waiting:
            self.waiting.remove(task)

    def _run(self, count: int) -> None:
        for task in self.waiting[:count]:
            task.run()
        del self.waiting[:count]


class Oracle:
    """Foresees what choices say, up to a random place: from there on what may be forbidden, too."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.texts: dict[ChoiceKey, list[int]] = {}

    def propose(self, request: Request, drafts_max: int) -> Ints:
        if request.key not in self.texts:
            said, reason, _ = alone(request.state)
            self.texts[request.key] = [*said, EOS] if reason is FinishReason.STOP else said
        start = request.outputs_count
        drafts = self.texts[request.key][start : start + self.dice.randint(0, drafts_max)]
        wrong = self.dice.randint(0, 2 * len(drafts))
        drafts[wrong:] = [self.dice.choice([EOS, 11, token + 1]) for token in drafts[wrong:]]
        return np.array(drafts, np.int32) % VOCAB_SIZE

    def ended(self, request: Request) -> None:
        self.texts.pop(request.key, None)


class World:
    def __init__(
        self,
        seed: int,
        *,
        overlap: bool,
        slow: bool = False,
        drafts_max: int = 0,
        draft_model: bool = False,
        ahead: int = 1,
        stumbles: float = 0.0,
    ) -> None:
        self.stumbles, self.moods = stumbles, random.Random(f"stumbles {seed}")
        self.random = random.Random(seed)
        self.slow = SlowMatcherExecutor(random.Random(seed)) if slow else None
        groups = [page_group(32), *([page_group(32, GroupKind.DRAFT)] if draft_model else [])]
        sizes = limits(
            step_tokens_max=48,
            chunk_tokens=16,
            running_max=8,
            context_tokens=120,
            vocab_size=VOCAB_SIZE,
            end_ids=frozenset({EOS}),
            conservativeness=0.0,
        )
        self.oracle, self.speculation = Oracle(random.Random(seed)), None
        if drafts_max:
            drafter = None if draft_model else self.oracle
            self.speculation = Speculation(drafter, drafts_max, sizes.running_max)
        self.batching = EngineCore(sizes, CachePools(groups), speculation=self.speculation)
        advance_inline(self.batching, self.slow)
        self.runner = MaskedRunner(groups, VOCAB_SIZE, seed)
        self.runner.draft_stumbles = stumbles / 2
        self.loop = BatchingLoop(
            *(self.batching, InTurn(self.runner), Mailbox(1), self.receive),
            clock=lambda: self.now,
            ahead=ahead if overlap else 0,
        )
        self.now = 0.0
        self.failures = 0
        self.states: dict[ChoiceKey, RequestState] = {}
        self.ids: dict[ChoiceKey, list[int]] = {}
        self.ends: dict[ChoiceKey, Finish] = {}
        self._reader = ProgressReader()

    def receive(self, report: StepReport) -> None:
        self.failures = report.failures
        for news in self._reader.read(report.progress):
            self.ids[news.key] += new_ids(news)
            if news.finish is not None:
                self.ends[news.key] = news.finish

    def new_state(self) -> RequestState:
        dice = self.random
        guided = dice.random() < 0.6
        grammar = Grammar(
            kind=GrammarKind.REGEX,
            text=dice.choice(["a", "b", "barren"]),
            begins_after=AFTER if dice.random() < 0.3 else (),
        )
        return RequestState(
            request_id=RequestId(str(len(self.states))),
            choice=dice.randint(0, 2),
            prompt_ids=pack_ids([dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 40))]),
            sampling=SamplingParams(
                max_new_tokens=dice.choice([1, 10, 60]),
                seed=dice.randint(0, 9),
                ignore_eos=dice.random() < 0.5,
                grammar=grammar if guided else None,
            ),
            deadline_unix_ms=0,
        )

    def send(self, states: Sequence[RequestState]) -> list[ChoiceKey]:
        keys = [ChoiceKey(len(self.states) + index) for index in range(len(states))]
        runs = dict(zip(keys, states, strict=True))
        self.states |= runs
        self.ids |= {key: list(unpack_ids(state.output_ids)) for key, state in runs.items()}
        self.turn(Mail(runs={key: (state, guide_of(state)) for key, state in runs.items()}))
        return keys

    def send_some(self) -> None:
        self.send([self.new_state() for _ in range(self.random.choice([0, 1, 4]))])

    def turn(self, mail: Mail | None = None) -> None:
        self.runner.stumble = self.moods.random() < self.stumbles
        self.receive(self.loop.turn(mail or Mail()))

    def drain(self) -> None:
        for _ in range(5000):
            if self.batching.idle:
                return
            self.turn()
        raise AssertionError("the choices do not end")

    def code(self, key: ChoiceKey) -> str | None:
        error = self.ends[key].error
        return None if error is None else error.code

    def verify(self) -> None:
        """Every choice has ended as it does by itself, or failed alone in a plan."""
        self.drain()
        self.turn()  # reads what is still in flight
        blamed = 0
        for key, state in self.states.items():
            ids, *end = alone(state)
            if self.code(key) == "internal":
                assert self.ids[key] == ids[: len(self.ids[key])]
                blamed += 1
                continue
            assert (self.ids[key], self.ends[key].reason, self.code(key)) == (ids, *end)
        assert blamed <= self.runner.raised
        assert self.failures == self.runner.raised, "something failed beside the runner"
        assert not any(self.batching.pools.used())
        assert not self.oracle.texts


def live_late(world: World) -> None:
    """Send requests to a world whose matchers are slow; pause it now and then."""
    for turn in range(40):
        world.send_some()
        if turn % 9 == 5:
            mode = world.random.choice([PauseMode.RETRACT, PauseMode.IN_PLACE])
            world.turn(Mail(commands=[PauseWorker(mode=mode), ContinueWorker()]))
    world.verify()
    assert world.slow is not None
    assert not world.slow.waiting


@both
@pytest.mark.parametrize("drafts_max", [1, 5], ids=lambda n: f"{n} drafts")
def test_the_worlds_reach_drafts_that_are_accepted_and_rejected(
    drafts_max: int, overlap: bool
) -> None:
    world = World(0, overlap=overlap, drafts_max=drafts_max)
    for _ in range(30):
        world.send_some()
    world.verify()
    assert world.speculation is not None
    counts = world.speculation.counts
    assert 30 < counts.accepted < counts.proposed


@both
@pytest.mark.parametrize("drafts_max", [0, 1, 5], ids=lambda n: f"{n} drafts")
@pytest.mark.parametrize("seed", [9, 31])
def test_the_worlds_reach_matchers_that_are_late(seed: int, drafts_max: int, overlap: bool) -> None:
    world = World(seed, overlap=overlap, slow=True, drafts_max=drafts_max)
    live_late(world)
    assert world.slow is not None
    assert world.slow.late > 20
    assert world.speculation is None or world.speculation.counts.accepted > 10


def test_drafts_are_counted_whose_matcher_is_late() -> None:
    world = World(3, overlap=False, slow=True, drafts_max=5)
    assert world.slow is not None
    assert world.speculation is not None
    world.slow.submit = world.slow.waiting.extend  # type: ignore[method-assign]
    states = [world.new_state() for _ in range(40)]
    for state in states:
        if state.sampling.grammar is not None:
            world.send([state])
    world.verify()
    assert world.speculation.counts.accepted > 10


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_fails_is_all_that_fails(seed: int, ahead: int) -> None:
    """Those launched after it rest on drafts that were never made."""
    how = {"drafts_max": 5, "draft_model": True, "ahead": ahead, "slow": seed % 2 == 1}
    world = World(seed, overlap=True, stumbles=0.2, **how)
    for _ in range(30):
        world.send_some()
    world.verify()
    assert world.runner.raised > 10
    assert world.runner.followed > 50


def test_who_waits_for_a_late_guide_holds_nobody_up_and_ends_as_an_overload() -> None:
    world = World(1, overlap=False, slow=True)
    assert world.slow is not None
    world.slow.submit = lambda walks: None  # type: ignore[method-assign]
    world.slow.wait = lambda: None  # type: ignore[method-assign]
    guided, free = (
        msgspec.structs.replace(
            world.new_state(),
            sampling=SamplingParams(max_new_tokens=20, ignore_eos=True, grammar=grammar),
        )
        for grammar in (Grammar(kind=GrammarKind.REGEX, text="a"), None)
    )
    stuck, runs = world.send([guided, free])
    for _ in range(30):
        world.turn()
    assert world.ends[runs].error is None
    assert len(world.ids[runs]) == 20
    assert stuck not in world.ends
    world.now = 11.0
    world.turn()
    assert world.code(stuck) == "overloaded"
    assert world.batching.pools.used() == [0]


@both
@pytest.mark.parametrize("slow", [False, True], ids=["", "late"])
def test_a_guide_that_raises_ends_its_choice_alone(overlap: bool, slow: bool) -> None:
    world = World(3, overlap=overlap, slow=slow)
    sampling = SamplingParams(
        max_new_tokens=20, grammar=Grammar(kind=GrammarKind.REGEX, text="faulty")
    )
    faulty = msgspec.structs.replace(world.new_state(), sampling=sampling)
    key, *_ = world.send([faulty, *(world.new_state() for _ in range(6))])
    world.drain()
    assert world.code(key) == "internal"
    assert len(world.ids[key]) == 1
    del world.states[key]
    world.verify()


def test_the_worlds_reach_retraction_and_every_end_of_a_grammar() -> None:
    retractions, seen = 0, set[object]()
    for seed in range(6):
        world = World(seed, overlap=False)
        for _ in range(30):
            world.send_some()
        world.drain()
        retractions += world.batching.planner.retractions
        for key, finish in world.ends.items():
            if (grammar := world.states[key].sampling.grammar) is not None:
                seen.add((bool(grammar.begins_after), finish.reason.value, world.code(key)))
    assert retractions > 10
    assert seen >= {
        (deferred, *end) for deferred in (False, True) for end in (("stop", None), ("length", None))
    }
    assert (False, "error", "invalid_request") in seen


def test_a_choice_that_is_moved_at_any_token_goes_on_as_if_it_had_stayed() -> None:
    world = World(2, overlap=False)
    for name, after in (("a", ()), ("b", ()), ("a", AFTER)):
        grammar = Grammar(kind=GrammarKind.REGEX, text=name, begins_after=after)
        sampling = SamplingParams(max_new_tokens=40, seed=3, grammar=grammar)
        state = msgspec.structs.replace(world.new_state(), sampling=sampling)
        whole, reason, _ = alone(state)
        for cut in range(len(whole)):
            outputs = pack_ids(whole[:cut])
            moved = msgspec.structs.replace(state, output_ids=outputs)
            moved = msgspec.msgpack.decode(msgspec.msgpack.encode(moved), type=RequestState)
            (key,) = world.send([moved])
            world.drain()
            assert (world.ids[key], world.ends[key].reason) == (whole, reason)


def test_guided_rows_are_launched_ahead_and_make_a_token_a_step() -> None:
    """A mask follows its plan: what it depends on is in flight when the plan is launched."""
    steps: list[int] = []
    for overlap in (False, True):
        world = World(4, overlap=overlap)
        states = [world.new_state() for _ in range(20)]
        guided = next(state for state in states if state.sampling.grammar is not None)
        sampling = msgspec.structs.replace(guided.sampling, max_new_tokens=60)
        (key,) = world.send([msgspec.structs.replace(guided, sampling=sampling)])
        world.drain()
        steps.append(world.runner.plans)
        assert world.runner.futures >= (len(world.ids[key]) - 1 if overlap else 0)
    assert steps[1] <= steps[0] + 1
