"""A world whose worker has several ranks: each runs in threads of its own, by the real protocol.

What the ranks exchange passes a network of this process, which records it. A rank whose thread
raises has ended, as its process would have: whatever waits for it fails.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from threading import Event, Lock, Thread
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.simulation.batching_world import VOCAB_SIZE, Reports, RunFailed, World, WorldRunner
from tests.simulation.hash_runner import HashRunner, group_of

from antiphon.model_worker.batching.attention_groups import AttentionGroups
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.plan import Sampled, StepOutcome
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.ranks import protocol
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.protocol import FollowerRank, LeadRank, RankedLauncher
from antiphon.model_worker.speculation.policy import Speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.plan import (
        Flight,
        Ints,
        Launcher,
        Longs,
        PlanRunner,
        SamplingPart,
        StepPlan,
    )
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import EngineLimits, RequestState
    from antiphon.model_worker.batching.step_core import StepCore
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.model_worker.ranks.page_shards import PagesRequest
    from antiphon.model_worker.ranks.protocol import RankChannel

WAIT_S = 20.0
"""How long a rank waits for another one, which is there and never comes."""
LAYERS = 2
POINTS = ("receive", "layer 0", "layer 1", "sampling")
"""Where a rank may fail beyond what can be undone."""


class Hung(AssertionError):
    """A rank waits in a collective that the others never reach."""


def stacks() -> str:
    """Where each thread of this process is, and so what waits for what."""
    names = {thread.ident: thread.name for thread in enumerate_threads()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )


class RankEnded(Exception):
    """The process of a rank has ended, and with it its connections."""


LAYOUTS = (
    *(RankLayout(tp=2), RankLayout(tp=2), RankLayout(tp=3), RankLayout(tp=4)),
    *(RankLayout(pp=2), RankLayout(tp=2, pp=2), RankLayout(pp=3)),
)
GROUPED = RankLayout(tp=2, dp=2), RankLayout(tp=3, dp=3), RankLayout(tp=4, dp=2)
"""Those whose ranks attend to different requests."""


@dataclass(frozen=True)
class Collective:
    """A collective as one rank calls it, or a transfer as both of its ranks do."""

    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class Waiter:
    """A rank in a collective, woken once those that it awaits are there, or one of them ends."""

    awaited: frozenset[int]
    woken: Event = field(default_factory=Event)


class Network:
    """Groups of ranks, in each of which all call the same collectives in the same order.

    A link between two stages is a group of two, whose sends and receives match in pairs.
    """

    def __init__(self, layout: RankLayout, wait_s: float = WAIT_S) -> None:
        self.layout, self.ranks = layout, layout.ranks
        self.calls: dict[tuple[str, int], list[Collective]] = defaultdict(list)  # group, rank
        self._wait_s = wait_s
        self._values: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._waiters: dict[tuple[str, int], list[Waiter]] = defaultdict(list)
        self._ended: set[int] = set()
        self._lock = Lock()

    def end(self, rank: int) -> None:
        with self._lock:
            self._ended.add(rank)
            for waiter in chain(*self._waiters.values()):
                if rank in waiter.awaited:
                    waiter.woken.set()

    def call(
        self, group: str, rank: int, collective: Collective, value: Any, awaited: Sequence[int]
    ) -> dict[int, Any]:
        """Take part in the next collective of a group: the values of the ranks that are awaited."""
        own = Waiter(frozenset(awaited))
        with self._lock:
            calls = self.calls[group, rank]
            values = self._values[group, len(calls)]
            waiters = self._waiters[group, len(calls)]
            calls.append(collective)
            values[rank] = value
            for waiter in waiters:
                if values.keys() >= waiter.awaited:
                    waiter.woken.set()
            if values.keys() >= own.awaited:
                return values
            if not self._ended.isdisjoint(own.awaited):
                raise RankEnded
            waiters.append(own)
        if not own.woken.wait(self._wait_s):
            raise Hung(f"rank {rank} waits in {group}: {collective}\n{stacks()}")
        if not values.keys() >= own.awaited:
            raise RankEnded
        return values

    def members(self, group: str) -> list[int]:
        layout, (kind, *at) = self.layout, group.split()
        if kind == "tensor":
            return [layout.rank(int(at[0]), member) for member in range(layout.tp)]
        if kind == "attention":
            first, each = int(at[0]) * layout.attention_ranks, layout.attention_ranks
            return [*range(first, first + each)]
        if kind == "link":
            sender, member = map(int, at)
            return [layout.rank(stage, member) for stage in (sender, sender + 1)]
        return [*range(self.ranks)]

    def check(self) -> None:
        """Each rank has called what the others have, as far as it came."""
        for group in {group for group, _ in self.calls}:
            calls = [self.calls[group, rank] for rank in self.members(group)]
            shortest = min(map(len, calls))
            assert all(each[:shortest] == calls[0][:shortest] for each in calls), group


class Channel:
    def __init__(self, world: RankWorld, rank: int) -> None:
        self._world, self._network, self.rank = world, world.network, rank

    def send(self, message: bytearray) -> None:
        self._broadcast(message, ())

    def receive(self) -> bytearray:
        self._world.reach(self.rank, "receive", len(self._network.calls["plans", self.rank]))
        return bytearray(self._broadcast(None, (0,))[0])

    def max(self, values: Longs) -> Longs:
        call = Collective("max", values.shape, str(values.dtype))
        found = self._network.call("control", self.rank, call, values, range(self._network.ranks))
        return np.max([found[rank] for rank in range(self._network.ranks)], axis=0)

    def _broadcast(self, message: bytearray | None, awaited: Sequence[int]) -> dict[int, Any]:
        return self._network.call(
            "plans", self.rank, Collective("broadcast", (), "uint8"), message, awaited
        )


class Shard:
    """A rank's part of computing a plan: sums over ranks, before and after what may fail."""

    def __init__(self, world: RankWorld, rank: int) -> None:
        self._world, self.rank = world, rank

    def check(self) -> None:
        if self._world.refusing == self.rank:
            raise RunFailed

    def run_layers(self, plan: StepPlan) -> None:
        network, layout = self._world.network, self._world.network.layout
        stage, member = layout.stage(self.rank), layout.member(self.rank)
        if stage:
            assert self._pass(plan, stage - 1, [layout.rank(stage - 1, member)]) == plan.step
        group = f"tensor {stage}"
        for layer in range(LAYERS):
            self._world.reach(self.rank, f"layer {layer}", plan.step)
            if plan.groups_count:
                self._attend(plan, layer)
            call = Collective("sum", (len(plan.tokens), 4), "float32")
            network.call(group, self.rank, call, layer, network.members(group))
        if not self.is_last:
            self._pass(plan, stage, [])

    def run_drafts(self, plan: StepPlan) -> None:
        network = self._world.network
        assert plan.draft_counts is not None
        call = Collective("drafts", plan.draft_counts.shape, "float32")
        network.call("tensor 0", self.rank, call, plan.step, network.members("tensor 0"))

    @property
    def attention_group(self) -> int:
        layout = self._world.network.layout
        return layout.member(self.rank) // layout.attention_ranks

    def _attend(self, plan: StepPlan, layer: int) -> None:
        """Sum the tokens of the group, which may have none, and give them to all ranks."""
        network, own = self._world.network, self.attention_group
        tokens = plan.tokens_of(plan.rows_of(own))
        if count := tokens.stop - tokens.start:
            group, call = f"attention {own}", Collective("sum", (count, 4), "float32")
            network.call(group, self.rank, call, layer, network.members(group))
        else:
            self._world.seen["idle"] += 1
        call = Collective("sum", (len(plan.tokens), 4), "float32")
        network.call("tensor 0", self.rank, call, layer, network.members("tensor 0"))

    @property
    def is_last(self) -> bool:
        layout = self._world.network.layout
        return layout.stage(self.rank) == layout.pp - 1

    def _pass(self, plan: StepPlan, sender: int, awaited: Sequence[int]) -> int | None:
        """Send the stream of a plan, or receive it from the rank that is awaited: its step."""
        network = self._world.network
        group = f"link {sender} {network.layout.member(self.rank)}"
        call = Collective("pass", (len(plan.tokens), 4), "float32")
        values = network.call(group, self.rank, call, plan.step, awaited)
        return values[awaited[0]] if awaited else None


class LeadRunner(WorldRunner):
    """Reads the pages of all attention groups: every rank has the stream of all tokens."""

    world: RankWorld
    shard: Shard
    lead: LeadRank
    others: Sequence[HashRunner] = ()  # whose pages and states are those of the other groups
    last_of: Mapping[int, StepPlan] = {}  # of a turn, the last plan in which a group has rows

    def _context(self, plan: StepPlan, row: int, group: int) -> Ints:
        if (of := group_of(plan, row)) == 0:
            return super()._context(plan, row, group)
        return HashRunner._context(self.others[of - 1], plan, row, group)

    def check(self, plan: StepPlan) -> StepPlan:
        self.shard.check()
        return self.tables.fill(plan)

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        self.last, self.planned = plan, self.planned.union(plan.slot.tolist())
        active = np.flatnonzero(np.diff([] if plan.group_rows is None else plan.group_rows))
        self.last_of = {**self.last_of, **dict.fromkeys(active.tolist(), plan)}
        self.shard.run_layers(plan)
        outcome = HashRunner.run(self, plan, part)
        if len(plan.logit_tokens):
            self.lead.share(plan.step, lambda: Sampled(self._sampled(plan, outcome)))
        details = self._details(self._read[0], outcome)
        return msgspec.structs.replace(outcome, details=details)

    def make_drafts(self) -> Ints:
        self.shard.run_drafts(self._read[0])
        return super().make_drafts()

    def before_sampling(self) -> None:
        self.world.reach(0, "sampling", self.plans)

    def _draw(self, plan: StepPlan, row: int, contexts: list[Ints], logits: range) -> list[int]:
        self.world.read(0, plan, row, contexts)
        return super()._draw(plan, row, contexts, logits)

    def _sampled(self, plan: StepPlan, outcome: StepOutcome) -> Ints:
        """What was accepted of each of the logits (L,), -1 where nothing was."""
        ends = plan.query_start + plan.query_len
        rows = np.searchsorted(ends, plan.logit_tokens, side="right")
        place = np.arange(len(rows)) - np.searchsorted(rows, rows)
        index = outcome.starts[rows] + place
        ids = np.append(outcome.token_ids, -1)
        inside = index < outcome.starts[rows + 1]
        return np.where(inside, ids[np.where(inside, index, -1)], -1).astype(np.int32)


class FollowerRunner(HashRunner):
    """Writes what the first rank writes, and takes what it has drawn."""

    def __init__(self, world: RankWorld, shard: Shard, follower: FollowerRank) -> None:
        super().__init__(world.groups, VOCAB_SIZE)
        self._world, self._shard, self._follower = world, shard, follower
        self._sampled: list[int] = []
        self._unsampled = deque["StepPlan"]()

    def check(self, plan: StepPlan) -> StepPlan:
        self._shard.check()
        return self.tables.fill(plan)

    def _context(self, plan: StepPlan, row: int, group: int) -> Ints:
        if plan.groups_count and group_of(plan, row) != self._shard.attention_group:
            return NO_INTS
        return super()._context(plan, row, group)

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        if self._shard.is_last:
            self._shard.run_layers(plan)
            return self._record(plan)
        # As `StageRunner` does, it goes on before the plan is sampled from.
        self.settle()
        assert not (plan.tokens < 0).any(), "stages wait for no token"
        self._world.seen["passed on"] += bool(self._unsampled)
        self._shard.run_layers(plan)
        self._unsampled.append(plan)
        return NOTHING

    def make_drafts(self) -> Ints:
        self._shard.run_drafts(self._read[0])
        return super().make_drafts()

    def settle(self) -> None:
        while self._unsampled and (
            not len(self._unsampled[0].logit_tokens) or self._follower.shared
        ):
            self._record(self._unsampled.popleft())

    def _record(self, plan: StepPlan) -> StepOutcome:
        self._sampled = []
        if len(plan.logit_tokens):
            self._sampled = self._follower.share(plan.step, _not_here).tokens.tolist()
        self._world.reach(self._shard.rank, "sampling", plan.step)
        return super().run(plan)

    def _draw(self, plan: StepPlan, row: int, contexts: list[Ints], logits: range) -> list[int]:
        self._world.read(self._shard.rank, plan, row, contexts)
        return [self._sampled[logit] for logit in logits if self._sampled[logit] >= 0]


def _not_here() -> Sampled:
    raise AssertionError("only rank 0 samples")


NO_INTS = np.zeros(0, np.int32)
NOTHING = StepOutcome(
    step=0, starts=np.zeros(1, np.int32), token_ids=NO_INTS, status=NO_INTS, computed=NO_INTS
)
"""What an earlier stage knows of a plan that it has passed on."""


class Refusing:
    """A launcher of plans that one of the ranks refuses where the world fails."""

    def __init__(self, world: RankWorld, inner: Launcher) -> None:
        self._world, self._inner = world, inner
        self.thread: Thread | None = None
        self.draft_failures = 0

    def launch(self, plan: StepPlan) -> Flight:
        runner, ranks = self._world.runner, self._world.network.ranks
        self._world.refusing = None
        if runner.fail or runner.stumble:
            runner.stumble = False
            runner.raised += 1
            self._world.refusing = self._world.ranks_random.randrange(ranks)
            self._world.seen[f"refused by {min(self._world.refusing, 1)}"] += 1
        return self._inner.launch(plan)

    def wait(self) -> None:
        self._inner.wait()

    def close(self) -> None:
        self._inner.close()


class RankWorld(World):
    """A worker of several ranks. Where another world's plans fail, one of the ranks refuses them.

    `failing` is a rank and the point at which it fails from a random step on, which ends them all.
    """

    def __init__(
        self,
        seed: int,
        *,
        failing: tuple[int, str] | None = None,
        wait_s: float = WAIT_S,
        layouts: Sequence[RankLayout] = LAYOUTS,
        **said: Any,
    ) -> None:
        self.ranks_random = random.Random(f"ranks {seed}")
        drafting = said.get("draft_model", False)
        layouts = [each for each in layouts if each.pp == 1 or not drafting]
        self.network = Network(self.ranks_random.choice(layouts), wait_s)
        self.refusing: int | None = None
        self.failing, self.failing_step = failing, self.ranks_random.randint(1, 60)
        self.errors: dict[int, BaseException] = {}
        self._threads: list[Thread] = []
        super().__init__(seed, **{"draft_model": False, "stumbles": 0.05, **said})
        if drafting:
            # Drafts that fail end the ranks, and what is not finite is known to all of them.
            self.runner.draft_stumbles = 0.0
            self.runner.poisoned = lambda _plan, _row: False

    def _looped(self) -> StepCore[Any]:
        self.parts = [Part(self, number) for number in range(self.network.layout.dp)]
        if len(self.parts) == 1:
            return self.batching
        return GroupedCores([part.core for part in self.parts], self.parts)

    def _ahead(self, flights: random.Random, *, overlap: bool) -> int:
        stages = self.network.layout.pp
        return stages - 1 if stages > 1 else super()._ahead(flights, overlap=overlap)

    def _limits(self) -> EngineLimits:
        return msgspec.structs.replace(super()._limits(), flights=self.network.layout.pp)

    def _runner(self) -> WorldRunner:
        runner = LeadRunner(self.groups, VOCAB_SIZE, self.seed)
        runner.world, runner.shard = self, Shard(self, 0)
        runner.lead = self.lead = LeadRank(Channel(self, 0))
        self.lead.use(runner)
        groups = range(1, self.network.layout.dp)
        runner.others = [HashRunner(self.groups, VOCAB_SIZE) for _ in groups]
        self.followers = [self._start(rank) for rank in range(1, self.network.ranks)]
        return runner

    def _launcher_of(self, runner: PlanRunner) -> Launcher:
        return Refusing(self, RankedLauncher(super()._launcher_of(self.lead), self.lead))

    def reach(self, rank: int, point: str, count: int) -> None:
        """A rank fails here if the world says so."""
        if self.failing == (rank, point) and count >= self.failing_step:
            raise RunFailed

    def _start(self, rank: int) -> FollowerRunner:
        follower = FollowerRank(Channel(self, rank))
        runner = FollowerRunner(self, Shard(self, rank), follower)
        begin = self.begin_pages(rank, runner)

        def compute(runner: FollowerRunner) -> None:
            follower.compute(runner, begin)
            runner.settle()

        for work in (follower.receive, compute):
            name = f"rank {rank}, {work.__name__}"
            thread = Thread(target=self._run, args=(rank, work, runner), name=name)
            self._threads.append(thread)
            thread.start()
        return runner

    def _run(self, rank: int, work: Callable[[Any], None], runner: FollowerRunner) -> None:
        try:
            work(runner)
        except BaseException as error:  # noqa: BLE001  # as its process would end
            self.errors.setdefault(rank, error)
            self.network.end(rank)

    @contextmanager
    def ranks_end(self) -> Iterator[None]:
        """Afterwards rank 0 has ended, in order or by what it raises, and so have all others."""
        try:
            yield
            if self.failing is None:
                self.loop._finish_steps()
            self.lead.end()
        finally:
            self.network.end(0)
            for thread in self._threads:
                thread.join(2 * WAIT_S)
            left = any(thread.is_alive() for thread in self._threads)
            assert not left, f"a rank is left\n{stacks()}"
            self.network.check()

    def turn(self, mail: Mail | None = None) -> StepReport:
        if self.failing is None and len(self.parts) == 1:
            return super().turn(mail)
        before = [set(part.core.running.values()) for part in self.parts]
        assert isinstance(self.runner, LeadRunner)
        self.runner.last_of, self.runner.planned = {}, frozenset()
        self.turns += 1
        self.now += 1.0
        report = self.loop.turn(mail or Mail())
        self.receive(report)
        if self.failing is None:
            for part, running in zip(self.parts, before, strict=True):
                part.check(running)
        return report

    def begin_pages(
        self, rank: int, runner: FollowerRunner
    ) -> Callable[[PagesRequest], None] | None:
        """What a rank begins if pages are requested; None where they are not stored."""

    def read(self, rank: int, plan: StepPlan, row: int, contexts: Sequence[Ints]) -> None:
        """A rank has read what a row sees, by group, before it is sampled from."""

    def check_ranks(self) -> None:
        """All ranks have the same in their pages."""
        assert not self.errors
        assert isinstance(self.runner, LeadRunner)
        of_groups = [self.runner, *self.runner.others]
        for follower in self.followers:
            here = of_groups[follower._shard.attention_group]
            for mine, theirs in zip(here._pages, follower._pages, strict=True):
                assert (mine == theirs).all(), "ranks have written different pages"


class GroupedCores(AttentionGroups):
    """Notes where each choice was placed."""

    def __init__(self, cores: Sequence[EngineCore], parts: Sequence[Part]) -> None:
        super().__init__(cores)
        self._parts = parts

    def add(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None = None
    ) -> None:
        super().add(key, state, now, matcher)
        assert self._placed is not None
        self._parts[self.cores.index(self._placed[1])].keys.add(key)


class Part:
    """An attention group of a world, which is checked like a world that has one."""

    def __init__(self, world: RankWorld, number: int) -> None:
        self._world, self._number = world, number
        self.keys = set[ChoiceKey]()
        self.core = core = world.batching
        if number:
            self.core = _another(world, core)
        self._kept: dict[str, Any] = {
            "batching": self.core,
            "pools": self.core.pools,
            "_overtaken": {},
            "_overtaken_before": Counter[ChoiceKey](),
            "_idle_turns": {},
        }

    def check(self, before: set[Request]) -> None:
        world = self._world
        if len(world.parts) == 1:
            return
        whole = {name: getattr(world, name) for name in (*self._kept, "reported")}
        runner, watched = world.runner, world.watched
        assert isinstance(runner, LeadRunner)
        last = runner.last_of.get(self._number)
        planned, tables = runner.planned, watched.page_tables
        vars(world).update(self._kept)
        world.reported = Reports((key, whole["reported"][key]) for key in self.keys)
        first = self._number * world.limits.running_max
        runner.last = None if last is None else self._part(last)
        runner.planned = frozenset(
            slot - first for slot in planned if 0 <= slot - first < world.limits.running_max
        )
        watched.page_tables = {
            plan.step: tuple(table[plan.rows_of(self._number)] for table in tables[plan.step])
            for plan in (each.record.plan for each in world.loop._flights if each.record)
        }
        try:
            world.check_pages()
            world.check_scopes()
            world.check_slots()
            world.check_budgets()
            world.check_order(before)
            world.check_decodes()
        finally:
            self._kept = {name: getattr(world, name) for name in self._kept}
            vars(world).update(whole)
            runner.planned, watched.page_tables = planned, tables

    def _part(self, plan: StepPlan) -> StepPlan:
        rows = plan.rows_of(self._number)
        tokens = plan.tokens_of(rows)
        logits = plan.logit_tokens
        return msgspec.structs.replace(
            plan,
            slot=plan.slot[rows],
            query_len=plan.query_len[rows],
            tokens=plan.tokens[tokens],
            logit_tokens=logits[(logits >= tokens.start) & (logits < tokens.stop)],
            states=tuple(table[rows] for table in plan.states),
        )


def _another(world: RankWorld, first: EngineCore) -> EngineCore:
    """The core of another attention group, with pages of its own."""
    pools, speculation = CachePools(world.groups), first.speculation
    if speculation is not None:
        speculation = Speculation(
            speculation.drafter,
            speculation.drafts_max,
            first.limits.running_max,
            speculation.costs,
        )
    index = RadixIndex(pools) if world.cached else None
    return EngineCore(first.limits, pools, index, first.rules, speculation=speculation)


@contextmanager
def without_agreement() -> Iterator[None]:
    """Each rank goes by its own check alone."""
    right = protocol.agree

    def wrong(channel: RankChannel, facts: protocol.StepFacts) -> protocol.StepFacts:
        try:
            return right(channel, facts)
        except protocol.StepRefused:
            if facts.refused_by:
                raise
            return facts

    protocol.agree = wrong
    try:
        yield
    finally:
        protocol.agree = right
