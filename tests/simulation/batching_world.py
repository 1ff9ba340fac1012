"""One worker's batching loop in a world of its own: random limits, rules, requests and faults."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np
from tests.simulation.hash_runner import Eager, EagerFlight, HashRunner, answer_alone
from tests.support.reports import new_ids
from tests.support.worker import page_group, plain_runs

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.plan import LogprobsBatch
from antiphon.model_worker.batching.slot_tables import SlotTables
from antiphon.model_worker.batching.state import (
    ChoiceKey,
    EngineLimits,
    Finish,
    Progress,
    RequestState,
    SampledTokens,
)
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.speculation.policy import Speculation, StepCosts
from antiphon.wire import namespaces
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import ContinueWorker, FlushCache, PauseMode, PauseWorker
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from threading import Thread

    from antiphon.model_worker.batching.plan import (
        Flight,
        Floats,
        Indices,
        Ints,
        Launcher,
        PlanRunner,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.step_core import StepCore

VOCAB_SIZE = 40
Scope = tuple[str, str]
"""The tenant and the salt of a request."""
NO_SCOPE: Scope = ("", "")
ACME: Scope = ("acme", "s")
GLOBEX: Scope = ("globex", "s")
SCOPES = [NO_SCOPE, NO_SCOPE, NO_SCOPE, NO_SCOPE, ACME, GLOBEX]
EOS = 3
LOGPROBS = TokenOutputParams(logprobs=True)
TOP = TokenOutputParams(logprobs=True, top=1)
DRAFTS_MAX = 4


def logprobs_of(places: Indices, ids: Indices) -> Floats:
    """The logprobs of tokens at these places of their sequence: of each pair another one."""
    return (-places - ids / 64).astype(np.float32)


class RunFailed(Exception):
    """What a kernel might raise."""


class WorldRunner(HashRunner):
    """Fails a plan, or poisons a row, where the world says so."""

    fail = False
    stumble = False  # fails once
    draft_stumbles = 0.0  # share of the drafts that fail
    raised = 0
    last: StepPlan | None = None
    planned: frozenset[int] = frozenset()
    """The slots of all plans of a turn: several, if one has failed."""

    def __init__(self, groups: Sequence[CacheGroup], vocab_size: int, seed: int = 0) -> None:
        super().__init__(groups, vocab_size)
        self._faults = random.Random(f"faults {seed}")

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        self.last, self.planned = plan, self.planned.union(plan.slot.tolist())
        outcome = super().run(plan, part)
        if self.fail or self.stumble:
            self._raise()
        return msgspec.structs.replace(
            outcome, details=self._details(outcome.plan or plan, outcome)
        )

    def before_sampling(self) -> None:
        """Half of the plans that fail do so before they know where their rows are."""
        if (self.fail or self.stumble) and self._faults.random() < 0.5:
            self._raise()

    def make_drafts(self) -> Ints:
        drafts = super().make_drafts()
        if self._faults.random() < self.draft_stumbles:
            self.drop_drafts()
            self._raise()
        return drafts

    def _raise(self) -> NoReturn:
        self.stumble = False
        self.raised += 1
        raise RunFailed

    def _details(self, plan: StepPlan, outcome: StepOutcome) -> LogprobsBatch | None:
        """The logprobs of what was accepted, in the rows that ask for them."""
        if (request := plan.details) is None:
            return None
        assert not len(request.prompt_tokens)
        asked = np.isin(np.arange(len(plan.slot)), request.rows)
        counts = np.where(asked, np.diff(outcome.starts), 0)
        row = np.repeat(np.arange(len(plan.slot)), counts)
        number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        ids = outcome.token_ids[outcome.starts[row] + number]
        ends = plan.query_start + plan.query_len
        first = np.searchsorted(plan.logit_tokens, plan.query_start)[row]
        drafts = ends[row] - 1 - plan.logit_tokens[first]
        values = logprobs_of((plan.kv_len[row] - drafts + number).astype(np.int32), ids)
        top = int(request.top.max(initial=0) > 0)
        return LogprobsBatch(
            starts=np.cumsum([0, *counts], dtype=np.int32),
            token_ids=ids,
            logprobs=values,
            top_ids=ids[:, np.newaxis][:, :top],
            top_logprobs=values[:, np.newaxis][:, :top],
            named_logprobs=np.zeros((len(ids), 0), np.float32),
        )


@dataclass
class Reported:
    state: RequestState
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: Finish | None = None
    dropped: bool = False
    started: bool = False
    returned: bool = False

    @property
    def sampled_only(self) -> bool:
        """Whether its logprobs are in the token store."""
        details = self.state.sampling.details
        return details is not None and details.sampled_only

    @property
    def live(self) -> bool:
        return self.finish is None and not self.dropped and not self.returned


class Reports(dict[ChoiceKey, Reported]):
    """What was reported of each choice, in the order in which they were sent."""

    def __init__(self, known: Iterable[tuple[ChoiceKey, Reported]] = ()) -> None:
        super().__init__(known)
        self._live = dict(self)

    def __setitem__(self, key: ChoiceKey, reported: Reported) -> None:
        super().__setitem__(key, reported)
        self._live[key] = reported

    def live(self) -> Mapping[ChoiceKey, Reported]:
        """Those that go on. The others, which are many more in the end, are looked at once."""
        self._live = {key: reported for key, reported in self._live.items() if reported.live}
        return self._live


class Watched:
    """A launcher that knows which pages the launched plans may read."""

    def __init__(self, launcher: Launcher, groups: Sequence[CacheGroup]) -> None:
        self._launcher = launcher
        self._tables = SlotTables(groups)
        self.thread: Thread | None = None
        self.fail = False
        self.failed = 0
        self.page_tables: dict[int, tuple[Ints, ...]] = {}

    def launch(self, plan: StepPlan) -> Flight:
        if self.fail:
            self.fail = False
            self.failed += 1
            raise RunFailed
        self.page_tables[plan.step] = self._tables.fill(plan).page_tables
        return self._launcher.launch(plan)

    @property
    def draft_failures(self) -> int:
        return self._launcher.draft_failures

    def wait(self) -> None:
        self._launcher.wait()

    def close(self) -> None:
        self._launcher.close()


class Oracle:
    """Foresees what a choice answers, and is wrong from a random place on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(f"drafts {world.seed}")
        self.drafted: set[ChoiceKey] = set()

    def propose(self, request: Request, drafts_max: int) -> Ints:
        count = self._random.randint(0, drafts_max)
        if not count:
            return np.zeros(0, np.int32)
        self.drafted.add(request.key)
        sampling, windows = request.state.sampling, [group.window for group in self._world.groups]
        ids, _ = answer_alone(
            request.ids().tolist(),
            count,
            (),
            VOCAB_SIZE,
            windows=windows,
            seed=sampling.seed,
            choice=request.state.choice,
            counted=request.ids(request.prompt_tokens).tolist() if sampling.penalised else None,
        )
        wrong = self._random.randint(0, 2 * count)
        drafts = [(t + (index >= wrong)) % VOCAB_SIZE for index, t in enumerate(ids)]
        self._world.seen["drafts"] += len(drafts)
        return np.array(drafts, np.int32)

    def ended(self, request: Request) -> None:
        self.drafted.discard(request.key)


class World:
    """A worker, and a client that sends and drops requests. A turn takes a second of its clock."""

    lengths: Sequence[int] = 0, 1, 5, 60, 10_000
    """Of which a choice has one at most."""
    flushes = 0.01
    """Share of turns in which the prefix cache is emptied."""

    def __init__(self, seed: int, *, overlap: bool = False, **said: Any) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.moods = random.Random(f"moods {seed}")
        self.returned = said.get("returned", 0.02)
        self.said = said
        page_tokens = self.pick("page_tokens", 1, 4, 16)
        groups = [self._group(GroupKind.FULL, page_tokens, None)]
        if self.pick("window", False, True):
            groups.append(self._group(GroupKind.WINDOW, page_tokens, self.random.randint(1, 20)))
        # A chance of its own, so that the worlds without states are those that they were.
        self._states = random.Random(~seed)
        state = self.said.get("state", self._states.choice(["no", "no", "yes", "yes", "only"]))
        if state != "no":
            groups = [] if state == "only" else groups
            groups.append(self._group(GroupKind.STATE, page_tokens, None))
        flights = random.Random(f"flights {seed}")
        self.ahead = self._ahead(flights, overlap=overlap)
        self._eager = flights.random() < 0.5
        self.draft_model = state != "only" and said.get("draft_model", flights.random() < 0.4)
        if self.draft_model:
            groups.append(
                page_group(groups[0].pages_total, GroupKind.DRAFT, page_tokens=page_tokens)
            )
        self.groups = groups
        self.pools = CachePools(groups)
        self.limits = self._limits()
        self.rules = self._rules()
        self.cached = self.pick("cached", True, True, False)
        index: RadixIndex | None = None
        if self.cached:
            index = RadixIndex(self.pools, STRATEGIES[self.pick("eviction", "lru", "lfu")])
        self.seen: Counter[str] = Counter()
        self.scopes: dict[RequestId, Scope] = {}
        self._roots: dict[bytes, Scope] = {}  # by namespace
        self.drafter = Oracle(self)
        drafts = self.pick("drafts", 0, 1, DRAFTS_MAX)
        costs = self.pick("costs", None, StepCosts((1, 2, 9), (1.0, 1.1, 3.0)))
        speculation: Speculation | None = None
        if drafts or self.draft_model:
            drafter = None if self.draft_model else self.drafter
            speculation = Speculation(drafter, drafts, self.limits.running_max, costs)
        self.batching = EngineCore(
            self.limits, self.pools, index, self.rules, speculation=speculation
        )
        self.runner = self._runner()
        self.runner.poisoned = lambda _plan, _row: self.random.random() < self.poison
        self.now = 0.0
        self.loop = BatchingLoop(
            *(self._looped(), self._launcher(), Mailbox(1), self.receive),
            clock=lambda: self.now,
            ahead=self.ahead,
        )
        self.reported = Reports()
        self.extras = random.Random(f"extras {seed}")
        self.stumbles = said.get("stumbles", 0.01)
        self.runner.draft_stumbles = self.stumbles / 2
        self._faults = random.Random(f"launches {seed}")
        self.penalised = said.get("penalised", 0.3)
        self.exact_share = self.pick("exact_share", 0.0, 0.5, 1.0)
        self.prompt_max = self.pick("prompt_max", 20, 70, 100)
        self.stems = [self._ids(self.random.randint(1, 60)) for _ in range(3)]
        self.poison = 0.0
        self.turns = 0
        self._overtaken: dict[ChoiceKey, float] = {}
        self._overtaken_before: Counter[ChoiceKey] = Counter()
        self._idle_turns: dict[ChoiceKey, int] = {}

    def _looped(self) -> StepCore[Any]:
        """What the loop runs."""
        return self.batching

    def _runner(self) -> WorldRunner:
        return WorldRunner(self.groups, VOCAB_SIZE, self.seed)

    def _launcher(self) -> Launcher:
        self.watched = Watched(self._launcher_of(self.runner), self.groups)
        return self.watched

    def _launcher_of(self, runner: PlanRunner) -> Launcher:
        """Whatever is given back or written too early is read by a plan that is computed late."""
        return Eager(runner) if self._eager else InTurn(runner)

    def pick(self, name: str, *options: Any) -> Any:
        """One of the options, or what the test says of it."""
        drawn = self.random.choice(options)
        return self.said.get(name, drawn)

    def _group(self, kind: GroupKind, page_tokens: int, window: int | None) -> CacheGroup:
        if kind is GroupKind.STATE:
            return page_group(self._states.randint(4, 40), kind, page_tokens=page_tokens)
        pages = self.random.randint(96, 240) // page_tokens
        return page_group(pages, kind, window, page_tokens=page_tokens)

    def _ahead(self, flights: random.Random, *, overlap: bool) -> int:
        """How many steps are launched ahead of the one whose outcome is read."""
        return flights.choice([1, 1, 2, 3]) if overlap else 0

    def _limits(self) -> EngineLimits:
        running_max = self.pick("running_max", 1, 3, 16)
        return EngineLimits(
            step_tokens_max=max(running_max, self.pick("step_tokens_max", 1, 7, 32, 256)),
            chunk_tokens=self.pick("chunk_tokens", None, 1, 5, 64),
            fill_tokens=self.pick("fill_tokens", None, 8, 64),
            prefill_max=self.pick("prefill_max", None, None, 1, 2),
            mixed=self.pick("mixed", True, False),
            running_max=running_max,
            queue_max=self.pick("queue_max", 8, 256),
            context_tokens=min(self.pools.tokens_max, 96),
            vocab_size=VOCAB_SIZE,
            end_ids=frozenset({EOS}),
            weights_digest="w",
            stream_interval=self.pick("stream_interval", 1, 1, 4),
            queue_timeout_s=self.pick("queue_timeout_s", None, None, 60.0),
            running_timeout_s=self.pick("running_timeout_s", None, None, 60.0),
            checkpoint_tokens=self._states.choice([16, 32, 64]),
            alone_tokens=self._states.choice([None, 24, 96]),
            conservativeness=self.pick("conservativeness", 0.0, 0.3, 1.0),
        )

    def _rules(self) -> QueueRules:
        return QueueRules(
            policy=self.pick("policy", *(p for p in Policy if p is not Policy.PRIORITY)),
            priority=self.pick("priority", False, True),
            low_first=self.pick("low_first", False, True),
            preempt_threshold=self.pick("preempt_threshold", 0, 2),
            max_overtake_s=self.pick("max_overtake_s", 5.0, 50.0),
        )

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]

    # What happens.

    def act(self) -> None:
        """One turn: some new requests, some dropped ones, sometimes a fault or an order."""
        live = list(self.reported.live())
        runs = [
            pair
            for _ in range(self.random.choice(self.said.get("arrivals", [0, 0, 0, 0, 1, 1])))
            for pair in self.new_choices()
        ]
        drops = {
            key: self.random.choice([None, 0, self.random.randint(0, len(self.reported[key].ids))])
            for key in live
            if self.random.random() < 0.01
        }
        for key in drops:
            self.reported[key].dropped = True
        asked = [
            tuple(key for key in live if self.reported[key].state.request_id == request_id)
            for request_id in dict.fromkeys(self.reported[key].state.request_id for key in live)
            if self.moods.random() < self.returned
        ]
        self.poison = 0.2 if self.random.random() < 0.01 else 0.0
        self.runner.fail = self.random.random() < 0.003
        self.runner.stumble = self.extras.random() < self.stumbles
        self.watched.fail = self._faults.random() < self.stumbles / 2
        orders = (FlushCache(),) if self.random.random() < self.flushes else ()
        if self.random.random() < 0.005:
            orders = (PauseWorker(mode=PauseMode.RETRACT), ContinueWorker())
        returns = dict.fromkeys(keys for keys in asked if drops.keys().isdisjoint(keys))
        self.turn(Mail(runs=plain_runs(runs), drops=drops, requeues=returns, commands=list(orders)))

    def turn(self, mail: Mail | None = None) -> StepReport:
        before = set(self.batching.running.values())
        self.runner.last, self.runner.planned = None, frozenset()
        self.turns += 1
        self.now += 1.0
        report = self.loop.turn(mail or Mail())
        self.receive(report)
        unread = sum(
            isinstance(launched.flight, EagerFlight) and launched.flight.failed
            for launched in self.loop._flights
        )
        raised = self.runner.raised + self.watched.failed
        assert report.failures == raised - unread, "something failed beside the runner"
        self.check_pages()
        self.check_scopes()
        self.check_slots()
        self.check_budgets()
        self.check_order(before)
        self.check_decodes()
        return report

    def new_choices(self) -> list[tuple[ChoiceKey, RequestState]]:
        prompt = self._ids(self.random.randint(0, self.prompt_max))
        if self.random.random() < 0.7:
            prompt = (self.random.choice(self.stems) + prompt)[: self.prompt_max]
        asked = self.extras.choice([None, None, LOGPROBS, TOP])
        sampling = SamplingParams(
            max_new_tokens=self.random.choice(self.lengths),
            frequency_penalty=float(self.extras.random() < self.penalised),
            seed=self.random.randint(-9, 9),
            stop_token_ids=(7,) if self.random.random() < 0.2 else (),
            ignore_eos=self.random.random() < self.exact_share,
        )
        if sampling.max_new_tokens:  # else it is scored
            sampling = msgspec.structs.replace(sampling, details=asked)
        tenant, salt = scope = self.moods.choice(SCOPES)
        digest = namespaces.cache_salt(salt)
        number = len(self.reported)
        self.scopes[RequestId(f"r{number}")] = scope
        pairs: list[tuple[ChoiceKey, RequestState]] = []
        for choice in range(self.random.choice([1, 1, 1, 3])):
            key = ChoiceKey(len(self.reported))
            state = RequestState(
                cache_salt=namespaces.tenant_salt(tenant, digest) if tenant else digest,
                request_id=RequestId(f"r{number}"),
                choice=choice,
                prompt_ids=pack_ids(prompt),
                sampling=sampling,
                priority=self.random.choice([0, 0, 1, 5]),
                deadline_unix_ms=0,
            )
            self.reported[key] = Reported(state)
            pairs.append((key, state))
        return pairs

    def receive(self, report: StepReport) -> None:
        for key in report.started:
            self.reported[key].started = True
        for key in report.returned:
            reported = self.reported[key]
            assert not reported.started, "what has begun was given back"
            assert not reported.ids
            reported.returned = True
            self.seen["returned"] += 1
        for news in report.progress:
            if isinstance(news, Progress):
                self._receive_progress(news)
            else:
                self._receive_sampled(news)

    def _receive_progress(self, progress: Progress) -> None:
        reported = self.reported[progress.key]
        assert not reported.dropped, "a dropped choice was reported"
        assert not reported.returned, "what was given back was reported"
        assert reported.finish is None, "a choice ended twice, or went on after its end"
        assert progress.start == len(reported.ids), "ids are missing or were reported before"
        reported.ids += new_ids(progress)
        reported.logprobs += self._logprobs(reported, progress)
        reported.finish = progress.finish
        if progress.finish is not None:
            error = progress.finish.error
            self.seen[error.code if error else str(progress.finish.reason)] += 1
        self.seen["cached"] += progress.cached_tokens > 0

    def _receive_sampled(self, sampled: SampledTokens) -> None:
        values = np.full(len(sampled), np.nan)
        values = values if sampled.logprobs is None else sampled.logprobs
        columns = sampled.keys, sampled.offsets, sampled.ids, values
        for key, offset, token, logprob in zip(*(c.tolist() for c in columns), strict=True):
            reported = self.reported[ChoiceKey(key)]
            assert reported.live, "a token of a choice that has ended"
            assert offset == len(reported.ids), "a token is missing or was reported before"
            reported.ids.append(token)
            reported.logprobs += [logprob] if reported.sampled_only else []
            self.seen["sampled"] += 1

    def _logprobs(self, reported: Reported, progress: Progress) -> list[float]:
        """The logprobs that come with new tokens, from the token store or beside them."""
        if reported.sampled_only and progress.outputs is not None:
            return progress.outputs.read_logprobs(progress.start, progress.end).tolist()
        tokens = list(progress.details.iter_tokens())
        assert [(token.token_id, token.logprob) for token in tokens] == [
            top for token in tokens for top in token.top
        ]
        return [token.logprob for token in tokens if token.logprob is not None]

    def drain(self) -> None:
        self.poison, self.runner.fail, self.runner.stumble = 0.0, False, False
        self.watched.fail = False
        for _ in range(100_000):
            idle = self.loop._core.idle
            self.turn()
            if idle:
                return
        raise AssertionError("the requests do not end")

    def in_flight(self, group: int) -> Iterable[int]:
        """The pages of a group that transfers hold."""
        del group
        return ()

    # What holds after each turn.

    def check_pages(self) -> None:
        """Every page is free, on its way back, or held by just those who list it."""
        tables = [request.table for request in self.batching.running.values()]
        for index, pool in enumerate(self.pools.pools):
            listed = Counter(p for table in tables if table for p in table.pages(index))
            listed.update(self.in_flight(index))
            del listed[HOLE]
            cached = sum(pool.holders(page) > count for page, count in listed.items())
            for page, count in listed.items():
                assert pool.holders(page) - count in {0, 1}, "a page has no known holder"
                if count > 1 and pool.holders(page) == count:
                    self.seen["forked"] += 1
            assert pool.used_count == len(listed) + pool.loose_count, "a page is lost"
            if index in self.pools.states:
                self.seen["checkpoint"] += pool.loose_count > 0
                self.seen["read by several"] += max(listed.values(), default=1) > 1
            assert self.cached or cached == 0
        assert all(pool.free_count <= pool.total for pool in self.pools.pools)
        for launched in self.loop._flights:
            assert launched.record is not None
            tables = self.watched.page_tables[launched.record.plan.step]
            for pool, table in zip(self.pools.pools, tables, strict=True):
                used = set(table[table >= 0].tolist())
                assert used.isdisjoint(pool._free), "a page is free that a plan may read"

    def check_scopes(self) -> None:
        """No page is held by two tenants or salts, nor found by another one."""
        held: list[dict[int, Scope]] = [{} for _ in self.groups]
        for request in self.batching.running.values():
            assert request.table is not None
            scope = self.scopes.get(request.state.request_id, NO_SCOPE)
            assert self._roots.setdefault(request.namespace, scope) == scope
            for group, of_group in enumerate(held):
                for page in set(request.table.pages(group)) - {HOLE}:
                    assert of_group.setdefault(page, scope) == scope, "scopes share a page"
                    self.seen["scoped"] += scope != NO_SCOPE
        if not isinstance(self.batching.index, RadixIndex):
            return
        for namespace, root in self.batching.index._tree._roots.items():
            if (scope := self._roots.get(namespace)) is None:
                continue  # of a request that ended in the turn in which it started
            nodes = [*root.children.values()]
            while nodes:
                node = nodes.pop()
                nodes += node.children.values()
                for group, pages in enumerate(node.pages):
                    for page in held[group].keys() & set(pages):
                        assert held[group][page] == scope

    def check_slots(self) -> None:
        """The arrays by slot say what the requests there say."""
        running, batch = self.batching.running, self.batching.batch
        assert all(request.running for request in running.values())
        assert len(running) + batch.free_count == self.limits.running_max
        assert len(self.reported.live()) == len(running) + len(self.batching.waiting)
        for slot, request in running.items():
            assert slot == request.slot
            assert batch.keys[slot] == request.key
            table = batch.committed_table(request)
            assert request.computed == table.committed
            for group in range(len(self.groups)):
                pages = table.pages(group)
                entries = batch.entries[group][slot]
                assert entries == len(pages)
                assert batch.pages_held[group][slot] == len(pages) - pages.count(HOLE)
                if group in self.pools.states:
                    launched = batch.chains[group].used[slot]
                    assert entries <= 2 + launched, "more states than rows need"
                    continue
                ahead = batch.scheduled_len.item(slot) + batch.drafted.item(slot)
                needed = max(request.length, ahead) + 1
                assert entries <= self.groups[group].table_len(needed), "drafts keep their pages"
        empty = sorted(set(range(self.limits.running_max)) - set(running))
        assert not batch.length[empty].any()

    def check_budgets(self) -> None:
        plan, limits = self.runner.last, self.limits
        if plan is None:
            return
        arrays = [plan.slot, plan.tokens, plan.logit_tokens, *plan.states]
        assert {str(array.dtype) for array in arrays} == {"int32"}
        assert len(set(plan.slot.tolist())) == len(plan.slot), "a slot has two rows"
        assert plan.query_len.min() > 0, "a row has no tokens"
        prompts = plan.query_len[plan.query_len > 1 + DRAFTS_MAX]
        if limits.prefill_max is not None:
            assert len(prompts) <= limits.prefill_max
        if limits.fill_tokens is not None and len(prompts) > 1:
            assert prompts.sum() <= limits.fill_tokens
        if limits.chunk_tokens is not None or len(prompts) > 1:
            assert plan.query_len.sum() == len(plan.tokens) <= limits.step_tokens_max
        if limits.chunk_tokens is not None:
            alone = (limits.alone_tokens or 0) if len(plan.slot) == 1 else 0
            assert plan.query_len.max() <= max(limits.chunk_tokens, alone, 1 + DRAFTS_MAX)

    def check_order(self, before: set[Request]) -> None:
        """No request is overtaken for longer than was allowed, and by none in plain FCFS."""
        running = set(self.batching.running.values())
        started = [request for request in running - before if request.started_s == self.now]
        waiting = {key: self.batching._requests[key] for key in self.reported.live()}
        waiting = {key: r for key, r in waiting.items() if not (r.running or r.ended)}
        overdue = [
            key
            for key, since in self._overtaken.items()
            if key in waiting
            and not waiting[key].fetching  # until its blocks are there, or late, others pass
            and self.now - since + self._overtaken_before[key] >= self.rules.max_overtake_s
        ]
        if overdue and started:
            assert all(request.urgent for request in started), "an overdue request was passed"
            self.seen["urgent"] += 1
        for key in [key for key in self._overtaken if key not in waiting]:
            self._overtaken_before[key] += int(self.now - self._overtaken.pop(key))
        latest = max((request.arrival for request in started), default=0)
        for key, request in waiting.items():
            if request.arrival < latest:
                self._overtaken.setdefault(key, self.now)
                self.seen["overtaken"] += 1
                plain = self.rules.policy is Policy.FCFS and not self.rules.priority
                assert (
                    not plain
                    or request.following is not None
                    or request.started_s is not None
                    or request.fetched
                    or request.fetching
                )

    def check_decodes(self) -> None:
        """Whoever has begun to answer has a row in every plan, or in every other."""
        plan, running = self.runner.last, self.batching.running
        if self.ahead or plan is None:
            return
        if any(list(self.in_flight(group)) for group in range(len(self.groups))):
            # Where pages in flight are all that is missing, no request is retracted for them.
            self._idle_turns = {}
            return
        idle = {
            request.key: self._idle_turns.get(request.key, 0) + 1
            for slot, request in running.items()
            if slot not in self.batching.batch.prefills and slot not in self.runner.planned
        }
        self._idle_turns = idle
        allowed = 0 if self.limits.mixed else 1
        assert max(idle.values(), default=0) <= allowed, "a decode was left out"

    # What must have been said.

    def alone(self, state: RequestState) -> tuple[list[int], FinishReason]:
        """What the choice answers when no other request is there."""
        prompt, sampling = unpack_ids(state.prompt_ids), state.sampling
        return answer_alone(
            prompt,
            min(sampling.max_new_tokens, self.limits.context_tokens - len(prompt)),
            () if sampling.ignore_eos else {EOS, *sampling.stop_token_ids},
            VOCAB_SIZE,
            windows=[g.window for g in self.groups if g.kind is not GroupKind.DRAFT],
            seed=sampling.seed,
            choice=state.choice,
            counted=[] if sampling.penalised else None,
        )

    def verify(self, reported: Reported) -> None:
        """What was said is what the choice says alone, or a beginning of it where a fault hit."""
        if reported.returned:
            return
        prompt_tokens = len(reported.state.prompt_ids) // 4
        least = min(reported.state.sampling.max_new_tokens, 1)
        if not prompt_tokens or prompt_tokens + least > self.limits.context_tokens:
            assert reported.dropped or (reported.finish and reported.finish.error is not None)
            assert not reported.ids
            return
        ids, reason = self.alone(reported.state)
        if reported.state.sampling.details is not None:
            count = len(reported.ids)
            assert count <= len(ids), "more than the choice answers alone"
            places = np.arange(prompt_tokens, prompt_tokens + count, dtype=np.int32)
            expected = logprobs_of(places, np.array(ids[:count], np.int32))
            assert reported.logprobs == expected.tolist()
            self.seen["logprobs"] += count
        if reported.dropped or (reported.finish and reported.finish.reason is FinishReason.ERROR):
            assert reported.ids == ids[: len(reported.ids)]
            return
        assert reported.finish is not None
        assert (reported.ids, reported.finish.reason) == (ids, reason)
