from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.wire.codec import pack_ids
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.token_outputs import (
    TokenOutputs,
    TokenOutputsBuffer,
    TokenOutputsChunk,
    join_token_outputs,
    pack_floats,
    unpack_floats,
)


def details(first: int, count: int) -> TokenOutputs:
    """Of tokens that are numbered, so that each number shows whose it is."""
    tokens = range(first, first + count)
    return TokenOutputs(
        count=count,
        token_ids=pack_ids([100 + t for t in tokens]),
        logprobs=pack_floats([-t / 4 for t in tokens]),
        top_ids=pack_ids([v for t in tokens for v in (t + 1, t + 2)]),
        top_logprobs=pack_floats([v for t in tokens for v in (-t / 2, -t)]),
        hidden=pack_floats([v for t in tokens for v in (t, 0.5, -t)]),
    )


def test_columns_are_little_endian_and_row_after_row() -> None:
    assert pack_floats([1.5, -2.0]) == struct.pack("<2f", 1.5, -2.0)
    assert list(unpack_floats(struct.pack("<2f", 1.5, -2.0))) == [1.5, -2.0]
    one, two = details(4, 2).iter_tokens()
    assert (one.token_id, one.logprob, one.named) == (104, -1.0, ())
    assert one.top == ((5, -2.0), (6, -4.0))
    assert list(two.hidden) == [5.0, 0.5, -5.0]
    assert details(4, 2).ids() == {104, 105, 5, 6, 7}


def test_token_outputs_omit_columns_not_requested() -> None:
    [one] = TokenOutputs(count=1, token_ids=pack_ids([-1])).iter_tokens()
    assert (one.token_id, one.logprob, one.top, list(one.hidden)) == (-1, None, (), [])
    assert TokenOutputs(count=1, token_ids=pack_ids([-1])).ids() == set()
    assert list(TokenOutputs().iter_tokens()) == []


@given(st.integers(-20, 5), st.lists(st.integers(0, 6), max_size=6), st.data())
def test_any_stretch_of_what_was_stored_can_be_taken(first: int, counts: list[int], data) -> None:
    store, at = TokenOutputsBuffer(first), first
    for count in counts:
        store.append(details(at, count) if count else TokenOutputs())
        at += count
    assert (store.first, store.end, len(store)) == (first, at, sum(counts))
    start, stop = (data.draw(st.integers(first - 2, at + 2)) for _ in range(2))
    tokens = range(max(start, first), min(stop, at))
    taken = store.read(start, stop)
    assert taken == (details(tokens.start, len(tokens)) if tokens else TokenOutputs())
    store.truncate(start)
    assert store.end == max(first, min(start, at))
    assert store.read(first, at).count == store.end - first
    more = details(store.end, 2)
    store.append(more)
    assert store.read(store.end - 2, store.end) == more


@given(st.integers(1, 9), st.data())
def test_a_cut_piece_and_what_came_before_make_the_whole(count: int, data) -> None:
    whole = details(0, count)
    at = data.draw(st.integers(1, count))
    store = TokenOutputsBuffer()
    store.append(whole)
    assert join_token_outputs([store.read(0, at), whole.drop_first(at)]) == whole
    piece = TokenOutputsChunk(offset=-3, details=whole)
    rest = piece.beyond(-3 + at)
    assert (rest.offset, rest.end, rest.details.count) == (-3 + at, piece.end, count - at)
    assert piece.beyond(-10) is piece


@pytest.mark.parametrize(
    ("start", "prompt_tokens", "entries"),
    [(-1, 10, 0), (0, 10, 9), (1, 10, 9), (4, 10, 6), (9, 10, 1), (10, 10, 0), (50, 10, 0)],
)
def test_prompt_entries_exclude_the_first_prompt_token(start, prompt_tokens, entries) -> None:
    params = TokenOutputParams(logprobs=True, prompt_start=start)
    assert params.prompt_entries(prompt_tokens) == entries
