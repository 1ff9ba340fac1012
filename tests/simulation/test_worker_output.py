"""A worker, a leader, a detokenizer and an owner on a virtual clock and a bus that loses things."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.simulation.hash_runner import HashRunner, answer_alone
from tests.support.worker import (
    DETOKENIZER,
    GATEWAY,
    LEADER,
    WORKER,
    ColumnReader,
    admit,
    limits,
    page_group,
)

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.protocol.worker_output import Action, DropChoice, RunChoice, WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import FinishReason, Message
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import (
    Abort,
    Admit,
    Command,
    CommandBatch,
    ResendTokens,
    StopChoice,
    TokenCursor,
)
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import OpenList, OpenRequest
from antiphon.wire.tokens import TokenBatch, TokenRow

if TYPE_CHECKING:
    from collections.abc import Iterable


VOCAB_SIZE = 50
BEAT_MS = 500
STEP_MS = 5
LIFETIME_MS = 40_000


@dataclass
class Story:
    """One request, as all but the worker know it."""

    admit: Admit
    stop_at: dict[int, int]  # choice -> offset at which the detokenizer finds a stop string
    ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    ends: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    open: bool = True
    cancelled: bool = False
    introduced: bool = False

    @property
    def ended(self) -> bool:
        return len(self.ends) == len(self.admit.choices)


class Network:
    """Delivers late, in another order, twice or not at all, as its seed wills."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now_ms = 0
        self._wire: list[tuple[int, int, Message]] = []
        self._count = 0

    def send(self, message: Message, delay_ms: int | None = None) -> None:
        copies = (self.random.random() >= self.loss) + (self.random.random() < self.loss)
        for _ in range(copies):
            late = self.random.choice([1, 2, 3, 30]) if self.loss else 1
            self._count += 1
            heapq.heappush(self._wire, (self.now_ms + (delay_ms or late), self._count, message))

    def due(self) -> Iterable[Message]:
        while self._wire and self._wire[0][0] <= self.now_ms:
            yield heapq.heappop(self._wire)[2]


class World:
    """Everybody, and the messages between them."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.network = Network(seed + 1, loss)
        self.seqs = SeqSender()
        self.output = WorkerOutput(WORKER, self.seqs, live_max=64)
        group = page_group(60)
        self.pools = CachePools([group])
        sizes = limits(
            running_max=6, context_tokens=80, vocab_size=VOCAB_SIZE, end_ids=frozenset({1})
        )
        self.batching = EngineCore(sizes, self.pools)
        self.mailbox = Mailbox(64)
        runner = HashRunner([group], VOCAB_SIZE)
        self.loop = BatchingLoop(self.batching, InTurn(runner), self.mailbox, self.report)
        self.stories: dict[RequestId, Story] = {}
        self.reader = ColumnReader()
        self.commands = self.versions = self.seen_seq = 0
        self.asked_ms = -BEAT_MS

    @property
    def now_ms(self) -> int:
        return self.network.now_ms

    # The worker.

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case RunChoice():
                    self.mailbox.run(action.key, action.state)
                case DropChoice(key):
                    self.mailbox.drop(key)

    def report(self, report: StepReport) -> None:
        self.output.step(report.step, report.progress)

    def work(self) -> None:
        mail = self.mailbox.take(wait=False)
        assert mail is not None
        self.report(self.loop.turn(mail))
        for _, batch in self.output.take():
            self.network.send(batch)

    # The leader.

    def command(self, *commands: Command) -> None:
        self.commands += 1
        batch = CommandBatch(
            leader=LEADER,
            worker=WORKER,
            seq=self.commands,
            commands=commands,
            not_after_unix_ms=self.now_ms + 1_000,
        )
        self.network.send(batch)

    def submit(self) -> None:
        number = len(self.stories)
        choices = self.random.choice([1, 1, 2])
        prompt = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 30))]
        message = admit(
            f"r{number}",
            number,
            choices,
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(max_new_tokens=self.random.choice([0, 1, 20, 50]), seed=number),
            deadline_unix_ms=self.now_ms + LIFETIME_MS,
        )
        stop_at = {
            i: self.random.randint(1, 15) for i in range(choices) if self.random.random() < 0.3
        }
        self.stories[message.request_id] = Story(message, stop_at)
        self.command(message)

    def reconcile(self) -> None:
        """On a heartbeat: admit again what the worker does not hold, abort what it should not."""
        held = {line.request_id for line in self.output.held()}
        for request_id, story in self.stories.items():
            if story.open and not story.ended and request_id not in held:
                self.command(story.admit)
            elif story.cancelled and request_id in held:
                self.command(Abort(request_id=request_id, attempt=story.admit.attempt))

    # The detokenizer.

    def receive(self, batch: TokenBatch) -> None:
        gap = batch.seq > self.seen_seq + 1
        self.seen_seq = max(self.seen_seq, batch.seq)
        if batch.columns is not None and not self.reader.knows(batch.columns):
            gap, batch = True, msgspec.structs.replace(batch, columns=None)
        accepted = [self.accept(row) for row in self.reader.rows(batch)]
        if gap or not all(accepted):
            self.ask()

    def accept(self, row: TokenRow) -> bool:
        """Place a row; False where something before it is missing."""
        story = self.stories[row.request_id]
        assert row.attempt == story.admit.attempt
        story.introduced |= row.stream is not None
        if not story.introduced:
            return False
        ids = story.ids.setdefault(row.choice, [])
        if row.choice in story.ends:
            if row.finish_reason is None:
                self.stop(story, row.choice)
            return True
        if row.offset > len(ids):
            return False
        fresh = list(unpack_ids(row.token_ids))
        assert fresh[: len(ids) - row.offset] == ids[row.offset :][: len(fresh)], "a row differs"
        ids += fresh[len(ids) - row.offset :]
        stop_at = story.stop_at.get(row.choice)
        if stop_at is not None and len(ids) >= stop_at:
            del ids[stop_at:]
            story.ends[row.choice] = FinishReason.STOP
            self.stop(story, row.choice)
        elif row.finish_reason is not None:
            story.ends[row.choice] = row.finish_reason
        return True

    def stop(self, story: Story, choice: int) -> None:
        message = StopChoice(
            request_id=story.admit.request_id,
            attempt=story.admit.attempt,
            detokenizer=DETOKENIZER,
            choice=choice,
            offset=len(story.ids[choice]),
        )
        self.network.send(message)

    def ask(self) -> None:
        if self.now_ms - self.asked_ms < BEAT_MS:
            return
        self.asked_ms = self.now_ms
        places = tuple(
            TokenCursor(request_id=request_id, choice=choice, offset=len(ids))
            for request_id, story in self.stories.items()
            if story.introduced and story.open
            for choice, ids in story.ids.items()
        )
        self.network.send(ResendTokens(worker=WORKER, detokenizer=DETOKENIZER, places=places))

    # The owner.

    def own(self) -> None:
        for story in self.stories.values():
            if story.open and (story.ended or story.cancelled):
                story.open = False
                self.list_open(closed=(story.admit.request_id,), whole=False)

    @property
    def quiet(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self.output.held_count and not any(s.open for s in self.stories.values())

    def cancel_one(self) -> None:
        running = [story for story in self.stories.values() if story.open]
        if running:
            self.random.choice(running).cancelled = True

    def list_open(self, closed: tuple[RequestId, ...] = (), *, whole: bool = True) -> None:
        self.versions += 1
        opened = tuple(
            OpenRequest(request_id=i, deadline_unix_ms=story.admit.deadline_unix_ms)
            for i, story in self.stories.items()
            if story.open and whole
        )
        message = OpenList(
            model=ModelName("m"),
            owner=GATEWAY,
            version=self.versions,
            whole=whole,
            opened=opened,
            closed=closed,
            not_after_unix_ms=self.now_ms + 1_000,
        )
        self.network.send(message)

    # Time.

    def deliver(self, message: Message) -> None:
        match message:
            case CommandBatch():
                self.act(self.output.command(message, self.now_ms))
            case StopChoice():
                self.act(self.output.stop(message))
            case ResendTokens():
                self.output.resend(message)
            case OpenList():
                self.act(self.output.open_list(message, self.now_ms))
            case TokenBatch():
                self.receive(message)
            case _:
                raise AssertionError(message)

    def advance(self) -> None:
        self.network.now_ms += STEP_MS
        for message in self.network.due():
            self.deliver(message)
        self.work()
        self.own()
        if self.now_ms % BEAT_MS == 0:
            self.list_open()
            self.reconcile()
            self.act(self.output.tick(self.now_ms))
            if any(stream.seq > self.seen_seq for stream in self.seqs.streams()):
                self.ask()
        self.check()

    def check(self) -> None:
        live = sum(1 for _ in self.batching.running) + len(self.batching.waiting)
        assert self.output.live_count <= live + 64
        tables = [request.table for request in self.batching.running.values()]
        pages = [page for table in tables if table for page in table.pages(0)]
        # The choices of a request share the pages of its prompt.
        assert len(set(pages)) == self.pools.used()[0]

    def verify(self, story: Story) -> None:
        """Every choice says what it says alone: whole, or up to its stop string."""
        prompt, sampling = unpack_ids(story.admit.prompt_ids), story.admit.sampling
        longest, seed = min(sampling.max_new_tokens, 80 - len(prompt)), sampling.seed
        for output in story.admit.choices:
            ids, reason = answer_alone(
                prompt, longest, {1}, VOCAB_SIZE, seed=seed, choice=output.choice
            )
            stop_at = story.stop_at.get(output.choice, len(ids) + 1)
            if stop_at <= len(ids):
                ids, reason = ids[:stop_at], FinishReason.STOP
            said = story.ids.get(output.choice, [])
            if story.cancelled:
                assert said == ids[: len(said)]
            else:
                assert (said, story.ends[output.choice]) == (ids, reason)


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_once_with_its_own_words_and_leaves_nothing(
    seed: int, loss: float
) -> None:
    world = World(seed, loss)
    for _ in range(2000):
        if world.random.random() < 0.02:
            world.submit()
        if world.random.random() < 0.003:
            world.cancel_one()
        world.advance()
    for _ in range(4000):
        if world.quiet:
            break
        world.advance()
    assert len(world.stories) > 10
    assert world.reader.plain_count > 100
    assert [i for i, story in world.stories.items() if story.open] == []
    assert world.output.held_count == world.output.live_count == 0
    assert world.batching.idle
    assert world.pools.used() == [0]
    for story in world.stories.values():
        world.verify(story)
