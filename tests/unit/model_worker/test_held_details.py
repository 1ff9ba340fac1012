"""What is told of tokens, on its way from the batching loop to a detokenizer: once, cut to size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import FakeEngine, admit

from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress
from antiphon.model_worker.protocol.held_request import ROW_DETAILS_BYTES_MAX, HeldRequest
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.token_outputs import (
    TokenOutputs,
    join_token_outputs,
    pack_floats,
    unpack_floats,
)

if TYPE_CHECKING:
    from antiphon.wire.tokens import TokenRow

PROMPT_TOKENS = 6
KEY = ChoiceKey(1)


def details(first: int, stop: int, floats: int = 1) -> TokenOutputs:
    """Token n of the output has the id 100 + n; a token of the prompt has one below.

    Without `floats` of a hidden state, tokens have the outputs that the engine's store may have.
    """
    return TokenOutputs(
        count=stop - first,
        token_ids=pack_ids(range(100 + first, 100 + stop)),
        logprobs=pack_floats(-float(at) for at in range(first, stop)),
        hidden=pack_floats([0.5] * (floats * (stop - first))),
    )


def held(
    start: int | None, output: ChoiceOutput | None = None, *, in_store: bool = False
) -> HeldRequest:
    details = None
    if start is not None:
        details = TokenOutputParams(logprobs=True, prompt_start=start, hidden=not in_store)
    message = admit(
        prompt_ids=pack_ids(range(PROMPT_TOKENS)),
        sampling=SamplingParams(max_new_tokens=8, details=details),
    )
    if output is not None:
        message = msgspec.structs.replace(message, choices=(output,))
    return HeldRequest(message, [KEY], now_ms=0, due_ms=1000)


class Tokens:
    """The tokens of one request's only choice, as an engine reports them."""

    def __init__(self, request: HeldRequest, *, floats: int = 1, before: int = 0) -> None:
        self.choice = request.choices[0]
        self.floats = floats
        self.end = before
        self._engine = FakeEngine()
        self._engine.begin(KEY, range(100, 100 + before))

    def add(self, count: int, *, details_from: int | None = None, **fields: Any) -> None:
        """Report more of them, with details from an offset on; without `floats` of the prompt."""
        start, self.end = self.end, self.end + count
        first = start if details_from is None else details_from
        last = self.end if self.floats else min(0, self.end)
        told = details(first, last, self.floats) if first < last else TokenOutputs()
        progress = self._engine.progress(
            KEY,
            range(100 + start, 100 + self.end),
            logprobs=[-float(at) for at in range(start, self.end)],
            **{"details": told, **fields},
        )
        self.choice.extend(progress)


def sent(request: HeldRequest) -> list[TokenRow]:
    return list(request.unsent())


def check_rows(rows: list[TokenRow], first: int, stop: int) -> None:
    """The rows tell of [first, stop) without a gap, and each has the ids of just its tokens."""
    at = first
    for row in rows:
        assert row.details is not None
        assert row.offset == at
        at += row.details.count
        told = list(unpack_ids(row.details.token_ids))
        assert told == list(range(100 + row.offset, 100 + at))
        logprobs = [-float(each) for each in range(row.offset, at)]
        assert list(unpack_floats(row.details.logprobs)) == logprobs
        assert list(unpack_ids(row.token_ids)) == [token for token in told if token >= 100]
        assert row.offset >= 0 or at <= 0, "prompt and answer share a row"
    assert at == stop


def test_tokens_of_the_prompt_come_before_the_answer_at_negative_offsets() -> None:
    request = held(start=2)
    tokens = Tokens(request)
    tokens.add(1, details_from=-4)
    rows = sent(request)
    check_rows(rows, -4, 1)
    assert [row.offset for row in rows] == [-4, 0]
    assert rows[0].stream is not None
    assert rows[0].stream.details_from == -4
    tokens.add(2)
    check_rows(sent(request), 1, 3)
    assert sent(request) == []


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(-4, 200),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.data(),
)
def test_details_are_sent_again_from_any_offset(
    steps: list[int], offset: int, before: int, in_store: bool, data
) -> None:
    floats = 0 if in_store else 1
    sealed = None
    if before:
        ids = pack_ids(range(100, 100 + before))
        sealed = ChoiceOutput(choice=0, output_ids=ids, details=details(-4, before, floats))
    request = held(start=2, output=sealed, in_store=in_store)
    tokens = Tokens(request, floats=floats, before=before)
    for count in steps:
        tokens.add(count, details_from=None if tokens.end else -4)
        if data.draw(st.booleans()):
            sent(request)
    request.rewind({0: offset})
    check_rows(sent(request), min(offset, tokens.end), tokens.end)
    request.rewind({})
    check_rows(sent(request), -4, tokens.end)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 1)), min_size=1),
    st.integers(-4, 30),
    st.booleans(),
    st.data(),
)
def test_a_row_is_of_one_origin_and_names_a_new_one(
    steps: list[tuple[int, str, int]], offset: int, with_details: bool, data
) -> None:
    request = held(start=2 if with_details else None)
    tokens = Tokens(request)
    drawn: list[tuple[str, int]] = []
    rows: list[TokenRow] = []
    for number, (count, weights, retractions) in enumerate(steps):
        first = None if number else -4
        tokens.add(count, details_from=first, weights=weights, retractions=retractions)
        drawn += [(weights, retractions)] * count
        if data.draw(st.booleans()):
            rows += sent(request)
    rows += sent(request)
    check_origins(rows, drawn)
    request.rewind({0: offset})
    again = sent(request)
    check_origins(again, drawn)
    assert not again or again[0].weights is not None, "a new reader is not told"


def check_origins(rows: list[TokenRow], drawn: list[tuple[str, int]]) -> None:
    """What each row says of its tokens, or the last one before it that says something."""
    said: tuple[str, int] | None = None
    for row in rows:
        if row.weights is not None:
            said = (row.weights, row.retractions)
        count = len(unpack_ids(row.token_ids))
        assert all(each == said for each in drawn[max(0, row.offset) :][:count])


def test_a_row_holds_no_more_details_than_fit_into_a_message() -> None:
    floats = 2000
    request = held(start=0)
    Tokens(request, floats=floats).add(40, details_from=-5)
    rows = sent(request)
    check_rows(rows, -5, 40)
    sizes = [row.details.size_bytes for row in rows if row.details]
    assert max(sizes) <= ROW_DETAILS_BYTES_MAX
    assert len(rows) == 1 + 5, "eight of these fit into a row"


def test_a_row_holds_no_more_logprobs_of_the_store_than_fit_into_a_message() -> None:
    request = held(start=-1, in_store=True)
    Tokens(request, floats=0).add(20_000)
    rows = sent(request)
    check_rows(rows, 0, 20_000)
    assert [row.details and row.details.size_bytes for row in rows[:-1]] == [
        ROW_DETAILS_BYTES_MAX
    ] * 2


def test_ids_alone_are_details_if_logprobs_are_not_requested() -> None:
    message = admit(
        sampling=SamplingParams(max_new_tokens=8, details=TokenOutputParams(ids=True)),
    )
    request = HeldRequest(message, [KEY], now_ms=0, due_ms=1000)
    Tokens(request, floats=0).add(2)
    (row,) = sent(request)
    assert row.details == TokenOutputs(count=2, token_ids=pack_ids([100, 101]))


@pytest.mark.parametrize("in_store", [False, True])
def test_an_answer_of_no_tokens_has_one_entry_for_what_would_follow(in_store: bool) -> None:
    request = held(start=-1, in_store=in_store)
    follow = TokenOutputs(count=1, token_ids=pack_ids([-1]))
    finish = Finish(reason=FinishReason.LENGTH)
    Tokens(request).add(0, details=follow, finish=finish)
    (row,) = sent(request)
    assert (row.offset, row.token_ids, row.details) == (0, b"", follow)
    assert row.finish_reason is FinishReason.LENGTH
    request.repeat_end()
    (again,) = sent(request)
    assert (again.details, again.finish_reason) == (follow, FinishReason.LENGTH)


def test_an_end_is_sent_even_without_details() -> None:
    request = held(start=0)
    finish = Finish(reason=FinishReason.ERROR)
    request.choices[0].extend(Progress(key=KEY, finish=finish))
    (row,) = sent(request)
    assert (row.offset, row.finish_reason) == (-5, FinishReason.ERROR)


def test_what_was_sealed_with_the_ids_is_sent_with_them() -> None:
    output = ChoiceOutput(choice=0, output_ids=pack_ids([100, 101]), details=details(-4, 2))
    request = held(start=2, output=output)
    check_rows(sent(request), -4, 2)
    Tokens(request, before=2).add(1)
    check_rows(sent(request), 2, 3)


def test_what_only_its_detokenizer_has_is_not_sent_again() -> None:
    request = held(start=2, output=ChoiceOutput(choice=0, output_ids=pack_ids([100, 101])))
    assert sent(request) == []
    Tokens(request, before=2).add(2)
    check_rows(sent(request), 2, 4)
    request.rewind({0: 3})
    check_rows(sent(request), 3, 4)
    assert request.can_rewind({0: 2})
    assert not request.can_rewind({0: 1})


@pytest.mark.parametrize("offset", [0, 2, 9])
def test_details_beyond_a_stop_are_not_sent(offset: int) -> None:
    request = held(start=-1)
    Tokens(request).add(5)
    overrun = request.choices[0].stop(offset)
    assert overrun == max(0, 5 - offset)
    assert sent(request) == []


def test_rows_of_a_request_that_wants_none_have_none() -> None:
    request = held(start=-1)
    plain = held(start=None)
    Tokens(plain).add(1)
    (row,) = sent(plain)
    assert (row.details, row.stream.details_from if row.stream else 0) == (None, None)
    Tokens(request).add(2)
    (row,) = sent(request)
    assert row.details == join_token_outputs([details(0, 2)])
