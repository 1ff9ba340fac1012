"""Greedy answers to 200 prompts are those of transformers, however they were batched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.models.test_batching_with_model import Engine, Mode, mixture

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from tests.models.conftest import Reference

NEW_TOKENS = 16
NEAR_TIE = 1e-4
"""Of the logits' standard deviation. Below it, the order of the two likeliest is rounding."""
NEAR_TIES_MAX = 1e-3
"""The share of prompts in which a near tie may be decided the other way."""
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)

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


PROMPTS = mixture(200, seed=11, longest=130, prefixes=(31, 64, 77, 100))


class Judge:
    """Compares answers with transformers, each different one once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._near_ties: dict[tuple[int, ...], int] = {}

    def near_ties(self, prompt: list[int], answer: list[int]) -> int:
        """How many near ties an answer decided differently; anything more is an error.

        The answer is compared on from there, each token given those before it.
        """
        assert len(answer) == NEW_TOKENS
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


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_greedy_answers_are_those_of_transformers(llama: Path, judge: Judge, mode: Mode) -> None:
    ran = Engine(llama, mode).run(PROMPTS, GREEDY)
    differing = sum(
        judge.near_ties(prompt, answer) > 0
        for prompt, answer in zip(PROMPTS, ran.answers, strict=True)
    )
    assert differing <= NEAR_TIES_MAX * len(PROMPTS)
    assert ran.rows_max == mode.batch or mode.pages < Mode.pages
    assert (ran.cached_tokens > 0) == mode.cached
    assert (ran.retractions > 0) == (mode.pages < Mode.pages)


@pytest.mark.skipif(unavailable_reason() is not None, reason=f"CPU kernels: {unavailable_reason()}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_are_the_same_in_every_mode(llama: Path, dtype: str) -> None:
    """Drawn at random, so that a logit's last bit shows sooner or later."""
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=5)
    modes = [replace(mode, dtype=dtype, deterministic=True) for mode in MODES]
    answers = [Engine(llama, mode).run(PROMPTS, sampling).answers for mode in modes]
    assert all(answer == answers[0] for answer in answers)
