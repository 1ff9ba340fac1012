"""The batching loop over a real model, in every mode that must not change a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.models.tiny import VOCABULARY
from tests.support.models import open_model

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, RequestState
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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


RANDOM = np.random.default_rng(4)
LENGTHS = (3, 50, 17, 90, 8, 31, 64, 2)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
NEW_TOKENS = 30


def state(index: int) -> RequestState:
    return RequestState(
        request_id=RequestId(str(index)),
        choice=0,
        prompt_ids=pack_ids(PROMPTS[index]),
        sampling=SamplingParams(
            max_new_tokens=NEW_TOKENS, temperature=0.9 * (index % 2), top_p=0.9, seed=index
        ),
        deadline_unix_ms=2**52,
    )


def mail(*runs: tuple[ChoiceKey, RequestState]) -> Mail:
    return Mail(runs=dict(runs))


def run(folder: Path, pages: int, indices: range) -> tuple[dict[int, list[int]], StepReport]:
    """The texts of some requests that arrive one a turn, and the last report."""
    model = open_model(folder, pages=pages, dtype="float32")
    pools = CachePools(model.groups)
    limits = EngineLimits(
        step_tokens_max=40,
        chunk_tokens=24,
        running_max=6,
        context_tokens=min(256, pools.tokens_max),
        vocab_size=VOCABULARY,
        end_ids=frozenset(),
        weights_digest="",
        conservativeness=0.0,  # keeps nothing free for answers, so that some are retracted
    )
    batching = EngineCore(limits, pools)
    texts: dict[int, list[int]] = {index: [] for index in indices}

    def hear(report: StepReport) -> None:
        for progress in report.progress:
            texts[progress.key] += unpack_ids(progress.token_ids)

    loop = BatchingLoop(batching, model.runner, Mailbox(1), hear)
    for index in indices:
        hear(loop.turn(mail((ChoiceKey(index), state(index)))))
    for _ in range(2000):
        report = loop.turn(mail())
        hear(report)
        if batching.idle:
            assert report.credit.pages_free == pages
            return texts, report
    raise AssertionError("the loop does not come to an end")


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for index in range(len(PROMPTS)):
        texts |= run(llama, 64, range(index, index + 1))[0]
    return texts


@pytest.mark.parametrize("pages", [32, 40, 256], ids=lambda pages: f"{pages} pages")
def test_neighbours_chunks_and_retractions_leave_no_trace(
    llama: Path, alone: dict[int, list[int]], pages: int
) -> None:
    texts, report = run(llama, pages, range(len(PROMPTS)))
    assert texts == alone
    assert (report.retractions > 0) == (pages < 256)


def test_greedy_requests_say_what_transformers_says(
    llama: Path, reference, alone: dict[int, list[int]]
) -> None:
    for index in range(0, len(PROMPTS), 2):
        whole = PROMPTS[index] + alone[index]
        assert len(alone[index]) == NEW_TOKENS
        assert alone[index] == reference(llama).greedy_after(whole, len(PROMPTS[index]))
