"""A detokenizer that reads columns gets the tokens that one without them gets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from tests.support.worker import WORKER, FakeEngine, admit, process
from tests.unit.model_worker.test_output import LENGTH, Bench

from antiphon.model_worker.batching.state import Progress
from antiphon.model_worker.protocol.worker_output import Action, DropChoice, RunChoice, WorkerOutput
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import Abort, Admit, ResendTokens, StopChoice, TokenCursor
from antiphon.wire.errors import WorkerLost, encode_error
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.token_outputs import TokenOutputs, join_token_outputs, pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.state import AnyProgress, SampledTokens
    from antiphon.wire.base import Process
    from antiphon.wire.tokens import TokenRow

PROMPT_TOKENS = 3
RUNNING_MAX = 8
OUTPUTS = (
    None,
    None,
    TokenOutputParams(logprobs=True),
    TokenOutputParams(ids=True),
    TokenOutputParams(logprobs=True, prompt_start=1),
    TokenOutputParams(logprobs=True, top=1),
)
DETOKENIZERS = ("detokenizer", "another", "without columns")
EVENTS = ("abort", "down", "finish", "logprobs", "resend", "retract", "reused", "stop", "waits")


@dataclass
class RunningChoice:
    """A choice in the engine. It has a slot from its first tokens on, unless it was retracted."""

    key: int
    admit: Admit
    choice: int
    ids: list[int] = field(default_factory=list[int])
    origins: list[int] = field(default_factory=list[int])  # retractions before each of the ids
    slot: int | None = None
    retractions: int = 0

    @property
    def params(self) -> TokenOutputParams:
        return self.admit.sampling.details or TokenOutputParams()

    def logprob(self, offset: int) -> float:
        return -self.key - offset / 64

    def outputs(self, start: int, end: int) -> TokenOutputs:
        """The outputs of its tokens, except those that are in the engine's store."""
        params, row = self.params, self.params.top > 0
        if self.admit.sampling.details is None:
            return TokenOutputs()
        first = 1 - PROMPT_TOKENS if start == 0 and params.prompt_start >= 0 else start
        tokens = range(first, end if row else min(0, end))
        ids = pack_ids(self.ids[at] if at >= 0 else 99 for at in tokens)
        logprobs = pack_floats(map(self.logprob, tokens))
        return TokenOutputs(
            count=len(tokens),
            token_ids=ids,
            logprobs=logprobs,
            top_ids=ids if row else b"",
            top_logprobs=logprobs if row else b"",
        )


class World:
    """An engine and two outputs of it: one may send columns to two of three detokenizers.

    Messages are taken after most steps, as where only the event loop may publish. What they carry
    of each choice is compared, and with what the engine has sampled.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = FakeEngine()
        self.columns, self.rows = Bench(live_max=64), Bench(live_max=64)
        self.choices: dict[tuple[str, int], RunningChoice] = {}
        self.running: dict[int, RunningChoice] = {}
        self.dropped: list[int] = []  # the engine takes a step before it knows
        self.silent: set[tuple[str, int]] = set()  # nothing is to be sent of these any more
        self.seen: Counter[str] = Counter()
        self.received: dict[tuple[str, int], int] = {}  # tokens of each choice
        self.origins: dict[tuple[int, tuple[str, int]], int] = {}
        self._last_in_slot: dict[int, int] = {}
        self._steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.running) < RUNNING_MAX and self.chance(0.4):
                self.admit()
            self.step(link_up := not self.chance(0.15))
            if link_up and not self.chance(0.15):
                self.take()
            elif link_up:
                self.seen["waits"] += 1
            self.disturb()
        self.take()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def admit(self) -> None:
        to = InstanceId(self.random.choice(DETOKENIZERS))
        message = admit(
            f"r{len(self.choices)}",
            choices=self.random.choice([1, 1, 2]),
            detokenizer=to,
            sampling=SamplingParams(max_new_tokens=99, details=self.random.choice(OUTPUTS)),
            prompt_ids=pack_ids(range(PROMPT_TOKENS)),
            columns=False,
        )
        self.rows.command(message)
        reads = to != DETOKENIZERS[2]
        for run in self.columns.command(msgspec.structs.replace(message, columns=reads)):
            assert isinstance(run, RunChoice)
            choice = RunningChoice(run.key, message, run.state.choice)
            self.running[run.key] = self.choices[message.request_id, choice.choice] = choice

    def step(self, link_up: bool) -> None:
        self._steps += 1
        self.seen["down"] += not link_up
        progress: list[AnyProgress] = []
        sampled: list[RunningChoice] = []
        for one in list(self.running.values()):
            if one.slot is None or one.params.top or self.chance(0.1):
                if self.chance(0.6):
                    progress.append(self.extend(one))
            elif self.chance(0.9):
                sampled.append(one)
        if sampled:
            progress.insert(self.random.randint(0, len(progress)), self.sample(sampled))
        for key in self.dropped:
            self.running.pop(key, None)
            self.engine.retract(key)
        self.dropped.clear()
        ended = self.both(lambda out: out.step(self._steps, progress, link_up=link_up))
        assert not ended or any(isinstance(news, Progress) and news.finish for news in progress)

    def extend(self, one: RunningChoice) -> Progress:
        start = len(one.ids)
        count = self.random.choice([1, 1, 2, 90])
        ids = [self.random.randrange(100) for _ in range(count)]
        one.ids += ids
        one.origins += [one.retractions] * count
        finish = LENGTH if self.chance(0.12) else None
        progress = self.engine.progress(
            one.key,
            ids,
            finish,
            logprobs=[one.logprob(at) for at in range(start, start + count)],
            details=one.outputs(start, start + count),
            weights="w",
            retractions=one.retractions,
        )
        one.slot = progress.slot
        self.seen["reused"] += self._last_in_slot.get(one.slot, one.key) != one.key
        self._last_in_slot[one.slot] = one.key
        if finish is not None:
            self.seen["finish"] += 1
            del self.running[one.key]
        return progress

    def sample(self, choices: Sequence[RunningChoice]) -> SampledTokens:
        logprobs: dict[int, float] = {}
        for one in choices:
            if one.params.logprobs:
                self.seen["logprobs"] += 1
                logprobs[one.key] = one.logprob(len(one.ids))
            one.ids.append(self.random.randrange(100))
            one.origins.append(one.retractions)
        return self.engine.sampled({one.key: one.ids[-1] for one in choices}, logprobs or None)

    def disturb(self) -> None:
        event = self.random.choice([None, None, None, "abort", "held", "resend", "retract", "stop"])
        if event == "held":
            self.both(WorkerOutput.held)
        elif event == "resend":
            self.resend(process(self.random.choice(DETOKENIZERS)))
        elif event is not None and self.running:
            one = self.random.choice(list(self.running.values()))
            {"abort": self.abort, "retract": self.retract, "stop": self.stop}[event](one)
        if event is not None:
            self.seen[event] += 1

    def abort(self, one: RunningChoice) -> None:
        error = encode_error(WorkerLost("gone")) if self.chance(0.5) else None
        request = one.admit
        message = Abort(request_id=request.request_id, attempt=request.attempt, error=error)
        self.drop(lambda bench: bench.command(message), silent=error is None)

    def stop(self, one: RunningChoice) -> None:
        message = StopChoice(
            request_id=one.admit.request_id,
            attempt=one.admit.attempt,
            detokenizer=process(one.admit.detokenizer),
            choice=one.choice,
            offset=self.random.randint(0, len(one.ids)),
        )
        self.drop(lambda bench: bench.output.stop(message))

    def retract(self, one: RunningChoice) -> None:
        if one.slot is not None:
            self.engine.retract(one.key)
            one.slot, one.retractions = None, one.retractions + 1

    def drop(self, event: Callable[[Bench], list[Action]], *, silent: bool = True) -> None:
        drops, others = event(self.columns), event(self.rows)
        assert drops == others
        keys = [drop.key for drop in drops if isinstance(drop, DropChoice)]
        self.dropped += keys
        if silent:
            ended = [self.running[key] for key in keys if key in self.running]
            self.silent |= {(one.admit.request_id, one.choice) for one in ended}

    def resend(self, to: Process) -> None:
        places = tuple(
            TokenCursor(request_id=RequestId(name), choice=choice, offset=offset)
            for (name, choice), count in self.received.items()
            for offset in [self.random.choice([0, count, self.random.randint(0, count)])]
        )
        message = ResendTokens(worker=WORKER, detokenizer=to, places=places)
        self.both(lambda out: out.resend(message))

    def both(self, event: Callable[[WorkerOutput], object]) -> object:
        result, other = event(self.columns.output), event(self.rows.output)
        assert result == other
        return result

    def take(self) -> None:
        sent, others = self.sent_by(self.columns), self.sent_by(self.rows)
        for choice in self.silent & sent.keys():
            del sent[choice]  # its columns waited when it was stopped
        assert sent == others
        for (name, choice), row in sent.items():
            one = self.choices[name, choice]
            ids = list(unpack_ids(row.token_ids))
            at, received = max(0, row.offset), self.received.get((name, choice), 0)
            assert at <= received, "a token was left out"
            assert ids == one.ids[at : at + len(ids)]
            self.received[name, choice] = max(received, at + len(ids))

    def sent_by(self, bench: Bench) -> dict[tuple[str, int], TokenRow]:
        """What was sent of each choice, as one row."""
        sent: dict[tuple[str, int], list[TokenRow]] = {}
        for row in bench.rows():
            sent.setdefault((row.request_id, row.choice), []).append(row)
        for choice, rows in sent.items():
            self.check_origins(bench, choice, rows)
        return {choice: joined(rows) for choice, rows in sent.items()}

    def check_origins(
        self, bench: Bench, choice: tuple[str, int], rows: Sequence[TokenRow]
    ) -> None:
        """Rows name the retractions before their tokens; a plain one has those of the last row."""
        for row in rows:
            if row.weights is not None:
                self.origins[id(bench), choice] = row.retractions
            start, count = max(0, row.offset), len(unpack_ids(row.token_ids))
            truth = self.choices[choice].origins[start : start + count]
            assert truth == [self.origins[id(bench), choice]] * count


def joined(rows: Sequence[TokenRow]) -> TokenRow:
    """The tokens of consecutive rows, without their origins and numbers."""
    end = rows[0].offset
    for row in rows:
        assert row.offset == end, "a token is missing or repeated"
        end += len(unpack_ids(row.token_ids)) if row.offset >= 0 else -row.offset
    outputs = [row.details for row in rows if row.details is not None]
    return msgspec.structs.replace(
        rows[-1],
        offset=rows[0].offset,
        token_ids=b"".join(row.token_ids for row in rows),
        details=join_token_outputs(outputs) if outputs else None,
        stream=rows[0].stream,
        weights=None,
        retractions=0,
        stream_number=None,
    )


def test_columns_carry_what_rows_would_have_carried() -> None:
    worlds = [World(seed) for seed in range(40)]
    for world in worlds:
        world.run(60)
    seen = sum((world.seen for world in worlds), Counter[str]())
    assert min(seen[event] for event in EVENTS) > 50, seen
    assert sum(world.columns.plain_count for world in worlds) > 2000
    assert sum(world.rows.plain_count for world in worlds) == 0
