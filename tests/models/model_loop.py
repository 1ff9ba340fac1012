"""A batching loop over a model, driven turn by turn, and the outputs of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.models import open_model
from tests.support.reports import ProgressReader, new_ids
from tests.support.worker import limits, plain_runs, state

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import PoolMode, read_pooling
from antiphon.model_worker.batching.attention_groups import AttentionGroups
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import ForwardThread, InStream, InTurn, StreamRunner
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress, RequestState
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.ranks.protocol import LeadRank, RankedLauncher
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.wire.command import PauseMode
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams
from antiphon.wire.token_outputs import TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.batching.plan import PlanRunner
    from antiphon.model_worker.batching.step_core import StepCore
    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.model_worker.speculation.policy import Drafter
    from antiphon.wire.errors import ErrorReply

CONTEXT_TOKENS = 256
LINEAR = "plain" if unavailable_reason() else "packed"
"""What a worker would choose here."""
TURNS_MAX = 20_000
POOLED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "last": lambda stream: stream[-1],
    "cls": lambda stream: stream[0],
    "mean": lambda stream: stream.mean(dim=0),
}
"""What stands for a text, of its stream (T, D), by mode."""


@dataclass
class Output:
    """What the loop reported of a request."""

    sampling: SamplingParams
    progress: list[Progress] = field(default_factory=list[Progress])

    @property
    def ids(self) -> list[int]:
        return [token for news in self.progress for token in new_ids(news)]

    @property
    def tokens(self) -> list[TokenOutput]:
        """All token outputs. The token store has those that are logprobs of sampled tokens only."""
        wanted, found = self.sampling.details, list[TokenOutput]()
        if wanted is not None and not (wanted.sampled_only and self.sampling.max_new_tokens):
            wanted = None
        for news in self.progress:
            found += news.details.iter_tokens()
            if wanted is not None and news.outputs is not None:
                logprobs = news.outputs.read_logprobs(news.start, news.end).tolist()
                given = logprobs if wanted.logprobs else [None] * len(logprobs)
                columns = zip(new_ids(news), given, strict=True)
                found += [TokenOutput(token, one, (), (), ()) for token, one in columns]
        return found

    @property
    def finish(self) -> Finish:
        finish = self.progress[-1].finish
        assert finish is not None
        return finish

    @property
    def cached_tokens(self) -> int:
        return self.progress[-1].cached_tokens


class ModelLoop:
    """Requests in, outputs out. `runner` replaces the model's own; `changes` are limits.

    With a `drafter`, or the draft model of the runner, decodes verify up to `drafts_max` drafts
    each, whatever a step costs. So many steps are launched `ahead`, by default one with `overlap`.
    With a `lead` the model is the first of several ranks; with several `flights` these are stages,
    and with several `groups` each attends to its own requests.
    """

    def __init__(
        self,
        model: OpenModel,
        runner: PlanRunner | None = None,
        *,
        tree: bool = False,
        overlap: bool = False,
        ahead: int = 1,
        drafter: Drafter | None = None,
        drafts_max: int = 4,
        lead: LeadRank | None = None,
        groups: int = 1,
        **changes: Any,
    ) -> None:
        pools = [CachePools(model.groups) for _ in range(groups)]
        whole = {
            "context_tokens": min(CONTEXT_TOKENS, pools[0].tokens_max),
            "vocab_size": model.spec.vocabulary,
            "end_ids": frozenset[int](),
            **changes,
        }
        sizes = limits(**whole)

        def core(pools: CachePools) -> EngineCore:
            speculation: Speculation | None = None
            if drafter is not None or model.draft is not None:
                speculation = Speculation(drafter, drafts_max, sizes.running_max)
            index = RadixIndex(pools) if tree else None
            return EngineCore(sizes, pools, index, speculation=speculation)

        self.cores = [core(each) for each in pools]
        self.core, self.pools = self.cores[0], pools[0]
        self.speculation = self.core.speculation
        self._step_core = _whole(self.cores)
        runner = runner or lead or model.runner
        launcher = ForwardThread(runner) if overlap else InTurn(runner)
        own = runner if lead is None else lead.runner
        ranked = lead is not None and model.draft is None
        if isinstance(own, StreamRunner) and (overlap or ranked):
            launcher = InStream(own)
        self._launcher = launcher if lead is None else RankedLauncher(launcher, lead)
        ahead = sizes.flights - 1 if sizes.flights > 1 else ahead if overlap else 0
        looped, mailbox = self._step_core, Mailbox(1)
        self.loop = BatchingLoop(looped, self._launcher, mailbox, self._read, ahead=ahead)
        self.outputs: list[Output] = []
        self.reports: list[StepReport] = []
        self._reader = ProgressReader()

    def run(
        self,
        states: Sequence[RequestState],
        *,
        one_a_turn: bool = False,
        retract_at: Sequence[int] = (),
    ) -> list[Output]:
        """Run requests to their ends; afterwards every page is free or cached.

        They arrive at once or one a turn. In the turns `retract_at` all that run lose their slots
        and pages.
        """
        self.reports.clear()
        runs = {ChoiceKey(len(self.outputs) + n): state for n, state in enumerate(states)}
        self.outputs += [Output(state.sampling) for state in states]
        for part in [{key: runs[key]} for key in runs] if one_a_turn else [runs]:
            self._turn(Mail(runs=plain_runs(part)))
        for turn in range(TURNS_MAX):
            if self._step_core.idle:
                break
            if turn in retract_at:
                self._step_core.prepare_pause(PauseMode.RETRACT)
            self._turn(Mail())
        assert self._step_core.idle, "the loop does not come to an end"
        self._turn(Mail())  # reads what is still in flight
        for pools in (core.pools for core in self.cores):
            held = [u - c for u, c in zip(pools.used(), pools.loose(), strict=True)]
            assert not any(held), f"pages that no request has are held: {held}"
        self._launcher.close()
        return [self.outputs[key] for key in runs]

    @property
    def futures(self) -> int:
        """Tokens that were not known when their plan was made."""
        records = self.loop.recorder.records()
        return sum(int(np.count_nonzero(record.plan.tokens < 0)) for record in records)

    def _turn(self, mail: Mail) -> None:
        self._read(self.loop.turn(mail))

    def _read(self, report: StepReport) -> None:
        self.reports.append(report)
        for news in self._reader.read(report.progress):
            self.outputs[news.key].progress.append(news)


def compare_outputs(ours: Sequence[Output], theirs: Sequence[Output], near_tie: float) -> int:
    """Compare greedy tokens and their logprobs  ->  the number of tokens that are equal.

    Each output is compared up to the first token that differs: there the two likeliest of theirs,
    which have logprobs of two, must be closer than a near tie.
    """
    compared = 0
    for one, other in zip(ours, theirs, strict=True):
        for mine, reference in zip(one.tokens, other.tokens, strict=True):
            if mine.token_id != reference.token_id:
                (_, best), (_, second) = reference.top
                assert abs(best - second) < near_tie, (one.ids, other.ids)
                break
            if reference.logprob is not None:
                assert mine.logprob is not None
                assert abs(mine.logprob - reference.logprob) <= near_tie, (one.ids, other.ids)
            compared += 1
    return compared


def _whole(cores: Sequence[EngineCore]) -> StepCore[Any]:
    return AttentionGroups(cores) if len(cores) > 1 else cores[0]


class PoolingEngine:
    """Prompts in, vectors out; a model that takes its last token finds prefixes in the cache."""

    def __init__(
        self,
        folder: Path,
        *,
        chunk: int | None = None,
        batch: int = 8,
        pages: int = 512,
        linear: str = LINEAR,
        deterministic: bool = False,
        device: str = "cpu",
        overlap: bool = False,
    ) -> None:
        card = read_card(folder)
        pooling = read_pooling(folder, card, embedding=True)
        assert pooling is not None
        self.pooling, self.causal = pooling, card.causal
        self.model = model = open_model(
            folder,
            page_tokens=4,
            pages=pages,
            dtype="float32",
            linear=linear,
            deterministic=deterministic,
            device=device,
            pooling=pooling,
        )
        self._loop = ModelLoop(
            model,
            tree=pooling.mode is PoolMode.LAST and card.causal,
            overlap=overlap,
            step_tokens_max=512,
            chunk_tokens=chunk if card.causal else None,
            running_max=batch,
            queue_max=1000,
            pool_width=pooling.card.width,
        )
        self.errors: dict[int, ErrorReply] = {}
        self.cached_tokens = 0

    def vectors_of(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolParams | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[np.ndarray]:
        """The vectors of prompts that arrive at once; `errors` has those of the others."""
        sampling = sampling or SamplingParams(max_new_tokens=0, pool=params or PoolParams())
        vectors: list[np.ndarray] = []
        requests = [
            state(prompt, request_id=RequestId(str(number)), sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        for output in self._loop.run(requests):
            (progress,) = output.progress
            assert not output.ids
            self.cached_tokens += output.cached_tokens
            if output.finish.error is not None:
                self.errors[progress.key] = output.finish.error
                continue
            assert progress.details.count == 1
            vectors.append(np.frombuffer(progress.details.pooled, "<f4"))
        return vectors
