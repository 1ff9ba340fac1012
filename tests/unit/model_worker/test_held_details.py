"""What is told of tokens, on its way from the batching loop to a detokenizer: once, cut to size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import admit

from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress
from antiphon.model_worker.protocol.held_request import ROW_DETAILS_BYTES_MAX, HeldRequest
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.token_outputs import TokenOutputs, join_token_outputs, pack_floats

if TYPE_CHECKING:
    from antiphon.wire.tokens import TokenRow

PROMPT_TOKENS = 6
KEY = ChoiceKey(1)


def details(first: int, stop: int, floats: int = 1) -> TokenOutputs:
    """Token n of the answer has the id 100 + n; a token of the prompt has one below."""
    return TokenOutputs(
        count=stop - first,
        token_ids=pack_ids(range(100 + first, 100 + stop)),
        hidden=pack_floats([0.5] * (floats * (stop - first))),
    )


def held(start: int | None, output: ChoiceOutput | None = None) -> HeldRequest:
    details = None if start is None else TokenOutputParams(logprobs=True, prompt_start=start)
    message = admit(
        prompt_ids=pack_ids(range(PROMPT_TOKENS)),
        sampling=SamplingParams(max_new_tokens=8, details=details),
    )
    if output is not None:
        message = msgspec.structs.replace(message, choices=(output,))
    return HeldRequest(message, [KEY], now_ms=0, due_ms=1000)


def progress(first: int, stop: int, *, told_from: int | None = None, floats: int = 1) -> Progress:
    return Progress(
        key=KEY,
        token_ids=pack_ids(range(100 + first, 100 + stop)),
        details=details(first if told_from is None else told_from, stop, floats),
    )


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
        assert list(unpack_ids(row.token_ids)) == [token for token in told if token >= 100]
        assert row.offset >= 0 or at <= 0, "prompt and answer share a row"
    assert at == stop


def test_tokens_of_the_prompt_come_before_the_answer_at_negative_offsets() -> None:
    request = held(start=2)
    request.choices[0].append(progress(0, 1, told_from=-4))
    rows = sent(request)
    check_rows(rows, -4, 1)
    assert [row.offset for row in rows] == [-4, 0]
    assert rows[0].stream is not None
    assert rows[0].stream.details_from == -4
    request.choices[0].append(progress(1, 3))
    check_rows(sent(request), 1, 3)
    assert sent(request) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(-4, 200), st.data())
def test_details_are_sent_again_from_any_offset(steps: list[int], offset: int, data) -> None:
    request, at = held(start=2), 0
    for count in steps:
        told_from = -4 if at == 0 else None
        request.choices[0].append(progress(at, at + count, told_from=told_from))
        at += count
        if data.draw(st.booleans()):
            sent(request)
    request.rewind({0: offset})
    check_rows(sent(request), min(offset, at), at)
    request.rewind({})
    check_rows(sent(request), -4, at)


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
    drawn: list[tuple[str, int]] = []
    rows: list[TokenRow] = []
    for number, (count, weights, retractions) in enumerate(steps):
        at = len(drawn)
        plain = Progress(key=KEY, token_ids=pack_ids(range(100 + at, 100 + at + count)))
        told_from = None if number else -4
        step = progress(at, at + count, told_from=told_from) if with_details else plain
        request.choices[0].append(
            msgspec.structs.replace(step, weights=weights, retractions=retractions)
        )
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
    request.choices[0].append(progress(0, 40, told_from=-5, floats=floats))
    rows = sent(request)
    check_rows(rows, -5, 40)
    sizes = [row.details.size_bytes for row in rows if row.details]
    assert max(sizes) <= ROW_DETAILS_BYTES_MAX
    assert len(rows) == 1 + 5, "eight of these fit into a row"


def test_an_answer_of_no_tokens_has_one_entry_for_what_would_follow() -> None:
    request = held(start=-1)
    follow = TokenOutputs(count=1, token_ids=pack_ids([-1]))
    finish = Finish(reason=FinishReason.LENGTH)
    request.choices[0].append(Progress(key=KEY, details=follow, finish=finish))
    (row,) = sent(request)
    assert (row.offset, row.token_ids, row.details) == (0, b"", follow)
    assert row.finish_reason is FinishReason.LENGTH
    request.repeat_end()
    (again,) = sent(request)
    assert (again.details, again.finish_reason) == (follow, FinishReason.LENGTH)


def test_an_end_is_sent_even_without_details() -> None:
    request = held(start=0)
    finish = Finish(reason=FinishReason.ERROR)
    request.choices[0].append(Progress(key=KEY, finish=finish))
    (row,) = sent(request)
    assert (row.offset, row.finish_reason) == (-5, FinishReason.ERROR)


def test_what_was_sealed_with_the_ids_is_sent_with_them() -> None:
    output = ChoiceOutput(choice=0, output_ids=pack_ids([100, 101]), details=details(-4, 2))
    request = held(start=2, output=output)
    check_rows(sent(request), -4, 2)
    request.choices[0].append(progress(2, 3))
    check_rows(sent(request), 2, 3)


@pytest.mark.parametrize("offset", [0, 2, 9])
def test_details_beyond_a_stop_are_not_sent(offset: int) -> None:
    request = held(start=-1)
    request.choices[0].append(progress(0, 5))
    overrun = request.choices[0].stop(offset)
    assert overrun == max(0, 5 - offset)
    assert sent(request) == []


def test_rows_of_a_request_that_wants_none_have_none() -> None:
    request = held(start=-1)
    plain = held(start=None)
    plain.choices[0].append(Progress(key=KEY, token_ids=pack_ids([7])))
    (row,) = sent(plain)
    assert (row.details, row.stream.details_from if row.stream else 0) == (None, None)
    request.choices[0].append(progress(0, 2))
    (row,) = sent(request)
    assert row.details == join_token_outputs([details(0, 2)])
