"""Output ids and logprobs of all choices, in chunks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.worker import chunks_used, ints

from antiphon.model_worker.batching.token_store import CHUNK_TOKENS, OutputIds, TokenStore


def append(store: TokenStore, outputs: OutputIds, length: int, token: int, logprob: float) -> None:
    """Append a token to a choice of so many."""
    chunk = outputs.last_chunk if length % CHUNK_TOKENS else outputs.add_chunk()
    chunks, offsets = np.array([chunk]), np.array([length % CHUNK_TOKENS])
    store.write(chunks, offsets, ints(token), np.array([logprob], np.float32))


@pytest.mark.parametrize("length", [0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 5])
def test_choice_begins_with_the_ids_that_it_brings(length: int) -> None:
    outputs = TokenStore().open(np.arange(length, dtype=np.int32))
    assert outputs.read(0, length).tolist() == list(range(length))
    assert chunks_used(outputs._store) == -(-length // CHUNK_TOKENS)


def test_any_range_of_a_choice_is_read_whatever_is_appended_to_others() -> None:
    chance = random.Random(0)
    store = TokenStore()
    choices = [store.open(ints()) for _ in range(100)]
    written: list[list[int]] = [[] for _ in choices]
    for _ in range(20_000):  # so many that the store grows
        which = chance.randrange(len(choices))
        length, token = len(written[which]), chance.randrange(50_000)
        append(store, choices[which], length, token, -float(token))
        written[which].append(token)
    assert chunks_used(store) > 64
    for outputs, ids in zip(choices, written, strict=True):
        for _ in range(5):
            start = chance.randint(0, len(ids))
            end = chance.randint(start, len(ids))
            assert outputs.read(start, end).tolist() == ids[start:end]
            assert outputs.read_logprobs(start, end).tolist() == [-t for t in ids[start:end]]


def test_ids_that_a_choice_brings_are_in_a_store_that_grows_for_them() -> None:
    store = TokenStore()
    kept = [store.open(np.full(1, number, np.int32)) for number in range(200)]
    assert [outputs.read(0, 1).item() for outputs in kept] == [*range(len(kept))]


def test_what_was_read_does_not_change_when_its_chunk_is_used_again() -> None:
    store = TokenStore()
    outputs = store.open(ints(1, 2, 3))
    ids = outputs.read(0, 3)
    del outputs
    assert chunks_used(store) == 0
    others = [store.open(np.full(CHUNK_TOKENS, 9, np.int32)) for _ in range(64)]
    assert chunks_used(store) == len(others)
    assert ids.tolist() == [1, 2, 3]


def test_chunks_are_freed_with_the_last_reference() -> None:
    store = TokenStore()
    first = store.open(np.zeros(CHUNK_TOKENS + 1, np.int32))
    second = first
    del first
    assert chunks_used(store) == 2
    del second
    assert chunks_used(store) == 0


def test_logprobs_of_ids_that_a_choice_brings_are_unknown() -> None:
    store = TokenStore()
    before = store.open(ints())
    for length in range(64 * CHUNK_TOKENS):  # all chunks
        append(store, before, length, 5, -1.0)
    del before
    outputs = store.open(ints(1, 2, 3))
    append(store, outputs, 3, 4, -2.0)
    np.testing.assert_equal(outputs.read_logprobs(0, 4), [np.nan, np.nan, np.nan, -2.0])
