"""Requests that have migrated are prefilled beside running streams, and delay them little."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.simulation.hash_runner import HashRunner, both
from tests.support.worker import limits, page_group, state

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Progress
from antiphon.model_worker.cache.pages import CachePools
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.plan import Ints, SamplingPart, StepOutcome, StepPlan
    from antiphon.model_worker.batching.state import AnyProgress, RequestState

MIGRATED, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 500, 1000
STREAMS = 8
RUNNING_MAX = 64
CHUNK_TOKENS, FILL_TOKENS = 512, 256
"""Those of a worker on a CPU."""


class CountingRunner(HashRunner):
    """Notes the tokens of each plan, and always samples the same one."""

    def __init__(self) -> None:
        super().__init__([page_group(1, page_tokens=16)], 1000)
        self.plan_tokens: list[int] = []

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        self.plan_tokens.append(len(plan.tokens))
        return super().run(plan, part)

    def _context(self, plan: StepPlan, row: int, group: int) -> Ints:
        return np.zeros(0, np.int32)

    def _draw(self, plan: StepPlan, row: int, contexts: list[Ints], logits: range) -> list[int]:
        return [5]


class Worker:
    """A loop with some running streams; notes the plans between two tokens of each."""

    def __init__(self, *, mixed: bool, overlap: bool) -> None:
        self.random = random.Random(0)
        sizes = limits(
            step_tokens_max=2048,
            chunk_tokens=CHUNK_TOKENS,
            fill_tokens=FILL_TOKENS,
            mixed=mixed,
            running_max=RUNNING_MAX,
            queue_max=MIGRATED,
            context_tokens=4096,
            vocab_size=1000,
            end_ids=frozenset({1}),
        )
        self.core = EngineCore(sizes, CachePools([page_group(40_000, page_tokens=16)]))
        self.runner = CountingRunner()
        self.loop = BatchingLoop(
            self.core,
            InTurn(self.runner),
            Mailbox(1),
            lambda _: None,
            clock=lambda: 0.0,
            ahead=int(overlap),
        )
        self.streams = {
            ChoiceKey(number): self.request(number, new_tokens=4000, prompt_tokens=90)
            for number in range(STREAMS)
        }
        self.ended: set[ChoiceKey] = set()
        self.between: list[int] = []
        """Tokens that were computed from one token of a stream to its next."""
        self._sampled_at = dict.fromkeys(self.streams, 0)

    def request(
        self, number: int, *, new_tokens: int, prompt_tokens: int, output_tokens: int = 0
    ) -> RequestState:
        return state(
            [self.random.randrange(2, 1000) for _ in range(prompt_tokens)],
            request_id=RequestId(f"r{number}"),
            output_ids=pack_ids([5] * output_tokens),
            max_new_tokens=output_tokens + new_tokens,
            ignore_eos=True,
        )

    def turn(self, runs: dict[ChoiceKey, RequestState] | None = None) -> None:
        mail = Mail(runs={key: (run, None) for key, run in (runs or {}).items()})
        self._read(self.loop.turn(mail).progress)

    def _read(self, progress: Sequence[AnyProgress]) -> None:
        count = len(self.runner.plan_tokens)
        for news in progress:
            if isinstance(news, Progress):
                keys = [news.key]
                self.ended.update(keys if news.finish is not None else ())
            else:
                keys = [ChoiceKey(key) for key in news.keys.tolist()]
            for key in self.streams.keys() & keys:
                self.between.append(sum(self.runner.plan_tokens[self._sampled_at[key] :]))
                self._sampled_at[key] = count


@both
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alternating"])
def test_migrated_requests_delay_running_streams_by_one_prefill_chunk_a_token(
    overlap: bool, *, mixed: bool
) -> None:
    """384,000 tokens are prefilled again, while no stream waits for more than one plan of them."""
    worker = Worker(mixed=mixed, overlap=overlap)
    worker.turn(worker.streams)
    for _ in range(10):
        worker.turn()
    worker.between.clear()
    migrated = {
        ChoiceKey(STREAMS + number): worker.request(
            STREAMS + number,
            new_tokens=8,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
        for number in range(MIGRATED)
    }
    worker.turn(migrated)
    while worker.ended != migrated.keys():
        worker.turn()
    assert sum(worker.runner.plan_tokens) > MIGRATED * (PROMPT_TOKENS + OUTPUT_TOKENS)
    assert worker.core.planner.retractions == 0
    assert max(worker.between) <= CHUNK_TOKENS + RUNNING_MAX
