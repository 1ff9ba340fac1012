"""The batching loop over a real model, in every mode that must not change a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.models.draft_models import DRAFT_MODELS, by_ngrams, open_draft, with_draft
from tests.models.model_loop import CONTEXT_TOKENS, LINEAR, ModelLoop
from tests.models.tiny import VOCABULARY
from tests.support import worker
from tests.support.models import open_model

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.conftest import Reference

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.state import RequestState

PAGE_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How an engine is run. None of this may show in what it says.

    Attributes:
        ahead: Steps that are launched before the outcomes of those before them are read.
        drafts: By n-grams, or by one of `DRAFT_MODELS`; empty: there are none.
    """

    batch: int
    ahead: int = 0
    drafts: str = ""
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
        parts += [f"{self.ahead} ahead"] if self.ahead else []
        parts += [f"drafts: {self.drafts}"] if self.drafts else []
        return ", ".join(parts)


@dataclass
class Ran:
    """What came of a run: the answers, and what happened on the way."""

    answers: list[list[int]]
    cached_tokens: int
    retractions: int
    rows_max: int


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
        if mode.drafts in DRAFT_MODELS:
            with TemporaryDirectory() as beside:
                written = DRAFT_MODELS[mode.drafts](Path(beside))
                draft = open_draft(written, pages=mode.pages, dtype=mode.dtype, linear=LINEAR)
            model = with_draft(model, draft)
        self._loop = ModelLoop(
            model,
            tree=mode.cached,
            overlap=mode.ahead > 0,
            ahead=mode.ahead,
            drafter=by_ngrams() if mode.drafts == "n-grams" else None,
            step_tokens_max=2048,
            chunk_tokens=mode.chunk,
            running_max=mode.batch,
            queue_max=10_000,
            checkpoint_tokens=4 * PAGE_TOKENS,
            conservativeness=0.0,  # keeps nothing free for answers, so that few pages show
        )

    def run(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Ran:
        """Answer all prompts, which arrive at once."""
        requests = [
            worker.state(prompt, request_id=RequestId(str(index)), sampling=sampling)
            for index, prompt in enumerate(prompts)
        ]
        outputs = self._loop.run(requests)
        assert all(output.finish.error is None for output in outputs)
        return Ran(
            [output.ids for output in outputs],
            cached_tokens=sum(output.cached_tokens for output in outputs),
            retractions=self._loop.reports[-1].totals.retractions,
            rows_max=max(report.rows for report in self._loop.reports),
        )


RANDOM = np.random.default_rng(4)
LENGTHS = (3, 50, 17, 90, 8, 31, 64, 2)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
NEW_TOKENS = 30


def mixture(count: int, seed: int, longest: int, prefixes: Sequence[int]) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; half begin with a prefix of one of these lengths."""
    random = np.random.default_rng(seed)

    def drawn(length: int | np.integer) -> list[int]:
        return random.integers(0, VOCABULARY, length).tolist()

    shared = [drawn(length) for length in prefixes]
    half = range(count // 2)
    made = [drawn(random.integers(1, longest + 1)) for _ in half]
    made += [shared[n % len(shared)] + drawn(random.integers(1, 31)) for n in half]
    return [made[place] for place in random.permutation(count)]


def state(index: int) -> RequestState:
    sampling = {"temperature": 0.9 * (index % 2), "top_p": 0.9, "seed": index}
    name = RequestId(str(index))
    return worker.state(PROMPTS[index], request_id=name, max_new_tokens=NEW_TOKENS, **sampling)


def run(folder: Path, pages: int, indices: range) -> tuple[list[list[int]], StepReport]:
    """The texts of some requests that arrive one a turn, and the last report."""
    loop = ModelLoop(
        open_model(folder, pages=pages, dtype="float32"),
        step_tokens_max=40,
        chunk_tokens=24,
        running_max=6,
        conservativeness=0.0,  # keeps nothing free for answers, so that some are retracted
    )
    outputs = loop.run([state(index) for index in indices], one_a_turn=True)
    assert loop.reports[-1].capacity.pages_free == pages
    return [output.ids for output in outputs], loop.reports[-1]


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[list[int]]:
    return [run(llama, 64, range(index, index + 1))[0][0] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("pages", [32, 40, 256], ids=lambda pages: f"{pages} pages")
def test_neighbours_chunks_and_retractions_leave_no_trace(
    llama: Path, alone: list[list[int]], pages: int
) -> None:
    texts, report = run(llama, pages, range(len(PROMPTS)))
    assert texts == alone
    assert (report.totals.retractions > 0) == (pages < 256)


def test_greedy_answers_are_those_of_transformers(
    llama: Path, reference, alone: list[list[int]]
) -> None:
    for index in range(0, len(PROMPTS), 2):
        whole = PROMPTS[index] + alone[index]
        assert len(alone[index]) == NEW_TOKENS
        assert alone[index] == reference(llama).greedy_after(whole, len(PROMPTS[index]))


ANSWER_TOKENS = 16
NEAR_TIE = 1e-4
"""Of the logits' standard deviation. Below it, the order of the two likeliest is rounding."""
NEAR_TIES_MAX = 1e-3
"""The share of prompts in which a near tie may be decided the other way."""
GREEDY = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0)

MODES = (
    Mode(batch=1),
    Mode(batch=1, cached=True, chunk=24),
    Mode(batch=4, chunk=24),
    Mode(batch=16, cached=True),
    Mode(batch=16, chunk=17, pages=128),
    Mode(batch=16, cached=True, chunk=24, pages=160),
    Mode(batch=64),
    Mode(batch=64, cached=True, chunk=40),
    Mode(batch=64, cached=True, pages=512),
)

DRAFTS = ("n-grams", *DRAFT_MODELS)
LAUNCHED_AHEAD = (
    Mode(batch=4, chunk=24, ahead=1),
    Mode(batch=16, cached=True, chunk=24, pages=160, ahead=2),
    *(Mode(batch=16, cached=True, chunk=24, drafts=drafts, ahead=1) for drafts in DRAFTS),
    *(Mode(batch=16, chunk=17, pages=128, drafts=drafts) for drafts in DRAFTS),
)
"""A sample of what the long test runs."""
EVERY_WAY = [
    replace(mode, ahead=ahead, drafts=drafts)
    for mode in MODES
    for ahead in (0, 1, 3)
    for drafts in ("", *DRAFTS)
]

MIXTURE = mixture(200, seed=11, longest=130, prefixes=(31, 64, 77, 100))


class Judge:
    """Compares answers with transformers, each different one once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._near_ties: dict[tuple[int, ...], int] = {}

    def near_ties(self, prompt: list[int], answer: list[int]) -> int:
        """How many near ties an answer decided differently; anything more is an error.

        The answer is compared on from there, each token given those before it.
        """
        assert len(answer) == ANSWER_TOKENS
        whole = (*prompt, *answer)
        if whole not in self._near_ties:
            logits = self._reference.logits(whole[:-1])[len(prompt) - 1 :]
            best, said = logits.max(dim=-1).values, logits.gather(1, torch.tensor([answer]).T)[:, 0]
            gap = (best - said) / logits.std()
            assert float(gap.max()) < NEAR_TIE, f"off by {gap.max():.1e} standard deviations"
            self._near_ties[whole] = int((gap > 0).sum())
        return self._near_ties[whole]


@pytest.fixture(scope="module")
def judge(llama: Path, reference) -> Judge:
    return Judge(reference(llama))


@pytest.mark.parametrize("mode", [*MODES, *LAUNCHED_AHEAD], ids=str)
def test_greedy_answers_to_a_mixture_are_those_of_transformers(
    llama: Path, judge: Judge, mode: Mode
) -> None:
    check_greedy(llama, judge, mode)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_greedy_answers_are_the_same_in_every_way(llama: Path, judge: Judge) -> None:
    for mode in EVERY_WAY:
        try:
            check_greedy(llama, judge, mode)
        except AssertionError as error:
            raise AssertionError(f"{mode}: {error}") from error


def check_greedy(llama: Path, judge: Judge, mode: Mode) -> None:
    ran = Engine(llama, mode).run(MIXTURE, GREEDY)
    differing = sum(
        judge.near_ties(prompt, answer) > 0
        for prompt, answer in zip(MIXTURE, ran.answers, strict=True)
    )
    assert differing <= NEAR_TIES_MAX * len(MIXTURE)
    if mode.pages == Mode.pages and mode.drafts != "n-grams":  # some wait for their last token
        assert ran.rows_max == mode.batch
    assert (ran.cached_tokens > 0) == mode.cached
    assert (ran.retractions > 0) == (mode.pages < Mode.pages)


@pytest.mark.skipif(unavailable_reason() is not None, reason=f"CPU kernels: {unavailable_reason()}")
@pytest.mark.timeout(90)  # 20 s alone
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_deterministic_answers_are_the_same_in_every_mode(llama: Path, dtype: str) -> None:
    """Drawn at random, so that a logit's last bit shows sooner or later."""
    sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=1.0, seed=5)
    modes = [
        replace(mode, dtype=dtype, deterministic=True) for mode in (*MODES, *LAUNCHED_AHEAD[:4])
    ]
    answers = [Engine(llama, mode).run(MIXTURE, sampling).answers for mode in modes]
    assert all(answer == answers[0] for answer in answers)
