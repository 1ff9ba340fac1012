"""The batching loop over a real model, in every mode that must not change a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.models import open_model

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, RequestState
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.table import CachePools
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.wire.sampling import SamplingParams

PAGE_TOKENS = 4
CONTEXT_TOKENS = 256
TURNS_MAX = 20_000
LINEAR = "plain" if unavailable_reason() else "packed"
"""What a worker would choose here."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How an engine is run. None of this may show in what it says."""

    batch: int
    chunk: int | None = None
    cached: bool = False
    pages: int = 64 * CONTEXT_TOKENS // PAGE_TOKENS
    states: int = 64
    dtype: str = "float32"
    deterministic: bool = False

    def __str__(self) -> str:
        parts = [f"batch {self.batch}", "cached" if self.cached else "not cached"]
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"{self.pages} pages"] if self.pages < Mode.pages else []
        parts += [f"{self.states} states"] if self.states < Mode.states else []
        return ", ".join(parts)


@dataclass
class Ran:
    """What came of a run: the answers, and what happened on the way."""

    answers: list[list[int]]
    cached_tokens: int = 0
    retractions: int = 0
    rows_max: int = 0


class Engine:
    """A model behind its batching loop, driven by hand."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        model = open_model(
            folder,
            page_tokens=PAGE_TOKENS,
            pages=mode.pages,
            states=mode.states,
            dtype=mode.dtype,
            linear=LINEAR,
            deterministic=mode.deterministic,
        )
        pools = CachePools(model.groups)
        limits = EngineLimits(
            step_tokens_max=2048,
            chunk_tokens=mode.chunk,
            running_max=mode.batch,
            queue_max=10_000,
            context_tokens=min(CONTEXT_TOKENS, pools.tokens_max),
            vocab_size=model.spec.vocabulary,
            end_ids=frozenset(),
            weights_digest="",
            checkpoint_tokens=4 * PAGE_TOKENS,
            conservativeness=0.0,  # keeps nothing free for answers, so that few pages show
        )
        index = RadixIndex(pools) if mode.cached else None
        self._pools = pools
        self._batching = EngineCore(limits, pools, index)
        self._loop = BatchingLoop(self._batching, model.runner, Mailbox(1), self._hear)
        self._ran = Ran([])

    def run(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Ran:
        """Answer all prompts, which arrive at once; afterwards every page is free or cached."""
        self._ran = Ran([[] for _ in prompts])
        runs = {
            ChoiceKey(index): RequestState(
                request_id=RequestId(str(index)),
                choice=0,
                prompt_ids=pack_ids(prompt),
                sampling=sampling,
                deadline_unix_ms=2**52,
            )
            for index, prompt in enumerate(prompts)
        }
        self._hear(self._loop.turn(Mail(runs=runs)))
        for _ in range(TURNS_MAX):
            if self._batching.idle:
                held = [u - c for u, c in zip(self._pools.used(), self._pools.loose(), strict=True)]
                assert not any(held), f"pages are held by nobody: {held}"
                return self._ran
            self._hear(self._loop.turn(Mail()))
        raise AssertionError("the loop does not come to an end")

    def _hear(self, report: StepReport) -> None:
        ran = self._ran
        ran.retractions = report.retractions
        ran.rows_max = max(ran.rows_max, report.rows)
        for progress in report.progress:
            assert progress.finish is None or progress.finish.error is None, progress.finish
            ran.answers[progress.key] += unpack_ids(progress.token_ids)
            if progress.finish is not None:
                ran.cached_tokens += progress.cached_tokens
