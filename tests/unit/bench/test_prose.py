"""Perplexity over the pinned text is computed as its page states."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.bench.prose import FILE, PROSE, WINDOW, WINDOWS, perplexity, perplexity_of, windows
from tests.bench.summary import read

from antiphon.model_card.packaged import packaged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PROSE_SHA256 = "7f6e256410627120f85ae5f40de5646162c665fe4cc08d5c49542c471e7c7f12"


def test_perplexity_of_a_guess_among_all_tokens_is_their_number() -> None:
    found = perplexity(lambda ids: torch.zeros(len(ids), 50), [[1, 2, 3], [4, 5]])
    assert found == pytest.approx(50)


def test_perplexity_scores_each_token_by_the_logits_before_it() -> None:
    def foretold(ids: Sequence[int]) -> Tensor:
        logits = torch.full((len(ids), 10), -50.0)
        for at, token in enumerate(ids[1:]):
            logits[at, token] = 50.0
        return logits

    assert perplexity(foretold, [[3, 1, 4], [1, 5]]) == pytest.approx(1)
    shifted = perplexity(lambda ids: foretold(ids).roll(1, 0), [[3, 1, 4, 1, 5]])
    assert shifted > math.e


def test_windows_are_the_first_tokens_of_the_text() -> None:
    ids = list(range(WINDOW * WINDOWS + 7))
    assert [token for window in windows(ids) for token in window] == ids[:-7]
    with pytest.raises(AssertionError, match="the text has 5 tokens"):
        windows(ids[:5])


def test_committed_perplexities_are_of_the_pinned_text_and_file() -> None:
    setup = read(FILE).setup
    wheel = packaged(str(setup["model"]))
    assert wheel is not None
    assert setup["file_sha256"] == wheel.member_sha256
    found = hashlib.sha256(PROSE.read_bytes()).hexdigest()
    assert found == PROSE_SHA256, "measure again: the text is another"


def test_committed_perplexities_are_those_of_transformers() -> None:
    summary = read(FILE)
    assert summary.setup["tokens"] == WINDOW * WINDOWS
    assert abs(summary.row("change", arm="antiphon, float32").middle) < 1e-5
    assert abs(summary.row("change", arm="antiphon, bfloat16").middle) < 0.01


def test_committed_perplexities_are_within_one_percent_of_those_of_llama_cpp() -> None:
    summary = read(FILE)
    found = {
        reader.partition(",")[0]: summary.row("perplexity", arm=reader).middle
        for reader in summary.arms("perplexity")[2:]
    }
    assert abs(found["antiphon"] / found["llama.cpp"] - 1) < 0.01
    assert "dirty" not in summary.machine.commit


def test_losses_of_another_reader_are_summed_up_over_the_same_tokens() -> None:
    losses = [[math.log(7)] * (WINDOW - 1)] * WINDOWS
    assert perplexity_of(losses) == pytest.approx(7)
    for other in (losses[1:], [*losses[1:], losses[0][1:]]):
        with pytest.raises(ValueError, match="of 4 windows"):
            perplexity_of(other)
