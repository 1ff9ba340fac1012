"""The production batching loop of a worker in a simulated cluster; its model says given answers."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from tests.simulation.hash_runner import Eager, HashRunner
from tests.support.worker import chunks_used, page_group

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.plan import LogprobsBatch
from antiphon.model_worker.batching.state import EngineLimits
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.plan import (
        Floats,
        Ints,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import ChoiceKey, RequestState
    from antiphon.model_worker.cache.groups import CacheGroup

END_ID = 255
"""Ends an answer. No letter in UTF-8 has this byte."""
VOCAB_SIZE = 256
CONTEXT_TOKENS = 240
PAGE_TOKENS = 16
DRAFTS_MAX = 3
HIDDEN = 450
"""So that the details of a whole answer fill several messages."""


@dataclass(frozen=True)
class Run:
    """One choice: the ids of its prompt, its answer, and more ends than are ever sampled."""

    ids: Ints
    prompt_tokens: int


class AnswerRunner(HashRunner):
    """Samples the answer of each row's run; the row's pages hold the run up to there."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        super().__init__(groups, VOCAB_SIZE)
        self.runs: dict[int, Run] = {}  # by their seeds

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        outcome = super().run(plan, part)
        filled, _, _ = self._read
        if plan.details is None:
            return outcome
        return msgspec.structs.replace(outcome, details=self._details(filled, outcome))

    def _draw(self, plan: StepPlan, row: int, contexts: list[Ints], logits: range) -> list[int]:
        context, ids = contexts[0], self.runs[int(plan.sampling.seed[row])].ids
        known = len(context) - len(logits) + 1
        assert np.array_equal(context[:known], ids[:known]), "the pages hold another text"
        drawn: list[int] = []
        for place in range(known, len(context) + 1):
            drawn.append(int(ids[place]))
            if place < len(context) and context[place] != drawn[-1]:
                break
        return drawn

    def _details(self, plan: StepPlan, outcome: StepOutcome) -> LogprobsBatch:
        """Of each token numbers that show where it belongs, and bulk."""
        request = plan.details
        assert request is not None
        counts = np.zeros(len(plan.slot), np.int32)
        ids: list[Ints] = []
        offsets: list[Ints] = []
        for row in request.rows.tolist():
            begin, length = int(plan.query_start[row]), int(plan.query_len[row])
            start = int(plan.kv_len[row]) - length
            prompt_tokens = self.runs[int(plan.sampling.seed[row])].prompt_tokens
            inside = (request.prompt_tokens >= begin) & (request.prompt_tokens < begin + length)
            accepted = outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]]
            bounds = np.searchsorted(plan.logit_tokens, (begin, begin + length))
            first = start + length - max(0, int(bounds[1] - bounds[0]) - 1)
            ids += [request.prompt_targets[inside], accepted]
            offsets += [
                request.prompt_tokens[inside] - begin + start + 1 - prompt_tokens,
                np.arange(first, first + len(accepted), dtype=np.int32) - prompt_tokens,
            ]
            counts[row] = inside.sum() + len(accepted)
        tokens = np.concatenate(ids).astype(np.int32)
        values: Floats = -np.concatenate(offsets).astype(np.float32)
        return LogprobsBatch(
            starts=np.cumsum([0, *counts.tolist()], dtype=np.int32),
            token_ids=tokens,
            logprobs=values,
            top_ids=tokens[:, np.newaxis],
            top_logprobs=values[:, np.newaxis],
            named_logprobs=np.zeros((len(tokens), 0), np.float32),
            hidden=np.zeros((len(tokens), HIDDEN), np.float32),
        )


class Foresight:
    """Drafts a run's next tokens in every other step, and is wrong from a random place on."""

    def __init__(self, runs: dict[int, Run], name: str) -> None:
        self._runs = runs
        self._random = random.Random(f"drafts {name}")
        self.drafts = False

    def propose(self, request: Request, drafts_max: int) -> Ints:
        count = self._random.randint(0, drafts_max) if self.drafts else 0
        ids = self._runs[request.key].ids[request.length : request.length + count].copy()
        ids[self._random.randint(0, 2 * DRAFTS_MAX) :] = ord("?")
        return ids

    def ended(self, request: Request) -> None:
        pass


class WorkerEngine:
    """An engine core in its loop, without the threads: a turn runs when the world says so.

    Every other one launches a step before it has read the one before, and half of them have so few
    pages that requests are retracted.
    """

    def __init__(self, name: str, clock: Callable[[], float], running_max: int) -> None:
        chance = random.Random(f"engine {name}")
        self._random = random.Random(f"turns {name}")
        pages_least = CONTEXT_TOKENS // PAGE_TOKENS
        pages = max(pages_least, running_max * chance.choice((3, 16)))
        self.ahead = ahead = chance.choice((0, 1))
        limits = EngineLimits(
            step_tokens_max=max(running_max, chance.choice((64, 256))),
            chunk_tokens=chance.choice((16, 64)),
            mixed=chance.random() < 0.5,
            running_max=running_max,
            queue_max=running_max,
            context_tokens=CONTEXT_TOKENS,
            vocab_size=VOCAB_SIZE,
            end_ids=frozenset({END_ID}),
            weights_digest="w",
            hidden_states=True,
            conservativeness=0.0,
        )
        self.pools = CachePools([page_group(pages, page_tokens=PAGE_TOKENS)])
        self._runner = runner = AnswerRunner(self.pools.groups)
        self._drafter = Foresight(runner.runs, name)
        self.core = EngineCore(
            limits,
            self.pools,
            RadixIndex(self.pools),
            QueueRules(priority=True, preempt_threshold=4, max_overtake_s=2.0),
            speculation=Speculation(self._drafter, DRAFTS_MAX, running_max),
        )
        self.mailbox = Mailbox(2 * running_max)
        self.loop = BatchingLoop(
            self.core,
            Eager(runner) if ahead else InTurn(runner),
            self.mailbox,
            lambda _: None,
            clock=clock,
            ahead=ahead,
        )
        self.page_tokens = PAGE_TOKENS
        self.last = self.loop.turn(self._mail())

    def run(self, key: ChoiceKey, state: RequestState, answer: bytes) -> None:
        """Post a choice to the loop, which will say `answer`, of which it may have said some."""
        prompt = list(unpack_ids(state.prompt_ids))
        ends = [END_ID] * (4 + 2 * DRAFTS_MAX)
        self._runner.runs[key] = Run(np.array([*prompt, *answer, *ends], np.int32), len(prompt))
        sampling = msgspec.structs.replace(state.sampling, seed=int(key))
        self.mailbox.run(key, msgspec.structs.replace(state, sampling=sampling))

    def turn(self) -> StepReport | None:
        """One turn of the loop; None if it sleeps, since there is neither mail nor work."""
        mail = self._mail()
        if not (mail or self.loop._flights) and (self.loop.paused or self.core.idle):
            return None
        self._drafter.drafts = self._random.random() < 0.5
        report = self.loop.turn(mail)
        assert not report.failures, "the loop has caught an error"
        assert len(self.core.running) + self.core.batch.free_count == self.core.limits.running_max
        self.last = msgspec.structs.replace(report, progress=())
        return report

    def _mail(self) -> Mail:
        mail = self.mailbox.take(wait=False)
        assert mail is not None, "the mailbox is never closed"
        return mail

    @property
    def running(self) -> list[RequestState]:
        return [request.state for request in self.core.running.values()]

    def runs_only(self, live: Callable[[ChoiceKey], bool]) -> bool:
        """Whether it has no choice beside those, once it has read its mail."""
        mail = self.mailbox._mail
        return all(live(key) or key in mail.drops for key in self.core._requests)

    def check_empty(self) -> None:
        """No choice is left, and every slot and page is free once the prefix cache is flushed."""
        while self.turn() is not None:
            pass
        assert self.core.idle, "choices are left"
        assert self.core.batch.free_count == self.core.limits.running_max, "slots are left"
        assert self.pools.used() == self.pools.loose(), "pages are left"
        self.core.flush()
        assert self.pools.used() == [0], "pages are left that no cache holds"
        if chunks_used(self.core.batch.store):
            gc.collect()
        assert not chunks_used(self.core.batch.store), "ids of ended choices are left"
