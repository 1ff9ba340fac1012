"""Rows and batches: nothing of a row is lost, and no position leaves the context."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch
from tests.training.batches import UNSUPERVISED, Row, batches, collate
from tests.training.tokenizer import CONTEXT_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def test_a_label_is_the_next_token_where_it_is_supervised() -> None:
    rows = [
        Row([5, 6, 7, 8], [False, False, True, True], [0, 1, 2, 3]),
        Row([5, 9], [False, True], [0, 1]),
    ]
    batch = collate(rows, pad_id=0)
    none = UNSUPERVISED
    assert torch.equal(batch.token_ids, torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]]))
    assert torch.equal(batch.labels, torch.tensor([[none, 7, 8, none], [9, none, none, none]]))


def test_batches_stay_within_their_size_and_the_context(tokenizer: Tokenizer) -> None:
    for batch in islice(batches(tokenizer, seed=4, batch_tokens=2048), 60):
        assert batch.token_ids.numel() <= 2048
        assert int(batch.positions.max()) < CONTEXT_TOKENS
        assert bool((batch.labels != UNSUPERVISED).any())


def test_positions_only_rise_within_a_row(tokenizer: Tokenizer) -> None:
    for batch in islice(batches(tokenizer, seed=4, batch_tokens=2048), 20):
        for token_ids, positions in zip(batch.token_ids, batch.positions, strict=True):
            size = int((token_ids != 0).sum())
            assert bool((positions[1:size] > positions[: size - 1]).all())


def test_the_same_seed_makes_the_same_batches(tokenizer: Tokenizer) -> None:
    first = list(islice(batches(tokenizer, seed=9, batch_tokens=2048), 10))
    second = list(islice(batches(tokenizer, seed=9, batch_tokens=2048), 10))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.positions, other.positions)
