"""Token outputs are sent with the text of their tokens."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from tests.unit.detokenizer.test_machine import (
    GATEWAY,
    HERE,
    NO_STOP,
    REQUEST,
    attempt,
    batch,
    columns,
    decode,
    texts,
)

from antiphon.detokenizer.choice import PIECE_BYTES
from antiphon.detokenizer.machine import Detokenizer
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import StopStrings
from antiphon.wire.text import ChoiceCursor, ResumeText, TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, join_chunks, pack_floats
from antiphon.wire.tokens import TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence


PROMPT_ID = 33
TEXTS = StopStrings(token_texts=True)


class Bench:
    """A detokenizer that reads one answer, a byte a token."""

    def __init__(self, answer: str, stop: StopStrings, first: int = 0, floats: int = 1) -> None:
        self.machine = Detokenizer(HERE, decode, requests_max=4)
        self.answer = answer.encode()
        self.floats = floats
        self.stream = TokenStream(
            owner=GATEWAY,
            prompt_tokens=9,
            details_from=first,
            stop=stop,
            deadline_unix_ms=1_000_000,
        )
        self.seq = 0

    def details(self, start: int, stop: int) -> TokenOutputs:
        return TokenOutputs(
            count=stop - start,
            token_ids=pack_ids([self.token(at) for at in range(start, stop)]),
            logprobs=pack_floats(-float(at) for at in range(start, stop)),
            top_ids=pack_ids([65] * (stop - start)),
            top_logprobs=pack_floats([-1.0] * (stop - start)),
            hidden=pack_floats([0.0] * ((stop - start) * self.floats)),
        )

    def token(self, at: int) -> int:
        return self.answer[at] if at >= 0 else PROMPT_ID

    def push(self, start: int, stop: int, finish: FinishReason | None = None) -> list[TextRow]:
        self.seq += 1
        row = TokenRow(
            request_id=REQUEST,
            choice=0,
            attempt=attempt(1),
            offset=start,
            token_ids=pack_ids(list(self.answer[max(0, start) : max(0, stop)])),
            details=self.details(start, stop) if start < stop else TokenOutputs(),
            stream=self.stream,
            finish_reason=finish,
        )
        return texts(self.machine.on_tokens(batch(self.seq, row), 0.0))

    def resume(self, text_offset: int, token_offset: int | None) -> list[TextRow]:
        place = ChoiceCursor(
            request_id=REQUEST, choice=0, text_offset=text_offset, token_offset=token_offset
        )
        resume = ResumeText(detokenizer=HERE, gateway=GATEWAY, places=(place,))
        return texts(self.machine.on_resume(resume)[1])


def covered(rows: Sequence[TextRow]) -> tuple[int, int]:
    """The offsets that the rows' token outputs cover, without a gap."""
    pieces = [row.details for row in rows]
    for one, other in pairwise(pieces):
        assert one is not None
        assert other is not None
        assert one.end == other.offset
    whole = join_chunks(pieces)
    assert whole is not None
    return whole.offset, whole.end


def test_details_come_with_the_text_of_their_tokens() -> None:
    bench = Bench("aé日z", NO_STOP)
    assert covered(bench.push(0, 1)) == (0, 1)
    assert bench.push(1, 2) == []  # half a character
    (row,) = bench.push(2, 3)
    assert (row.text, covered([row])) == ("é", (1, 3))
    (row,) = bench.push(3, 7)
    assert (row.text, covered([row])) == ("日z", (3, 7))


def test_details_wait_while_their_text_may_begin_a_stop_string() -> None:
    bench = Bench("abENx", StopStrings(strings=("END",)))
    (row,) = bench.push(0, 4)
    assert (row.text, covered([row])) == ("ab", (0, 2))
    (row,) = bench.push(4, 5)
    assert (row.text, covered([row])) == ("ENx", (2, 5))


def test_token_outputs_after_a_stop_string_are_dropped() -> None:
    bench = Bench("abENDxyz", StopStrings(strings=("END",)))
    (row,) = bench.push(0, 8)
    assert (row.text, covered([row]), row.finish_reason) == ("ab", (0, 5), FinishReason.STOP)
    assert (row.usage and row.usage.completion_tokens) == 5


def test_prompt_tokens_have_outputs_but_no_text_and_are_not_counted() -> None:
    bench = Bench("ab", TEXTS, first=-4)
    (row,) = bench.push(-4, 0)
    assert (row.text, covered([row])) == ("", (-4, 0))
    assert (row.usage and row.usage.completion_tokens) == 0
    (row,) = bench.push(0, 2, FinishReason.LENGTH)
    assert (row.text, covered([row])) == ("ab", (0, 2))
    assert (row.details and row.details.texts) == {97: "a", 98: "b", 65: "A"}


def test_end_names_the_last_offset_of_token_outputs() -> None:
    bench = Bench("ab", NO_STOP)
    bench.push(0, 2)
    (row,) = bench.push(2, 2, FinishReason.LENGTH)
    assert row.details == TokenOutputsChunk(offset=2, details=TokenOutputs())


def test_next_token_of_a_prompt_has_outputs_and_is_not_counted() -> None:
    bench = Bench("?", NO_STOP, first=-2)
    bench.push(-2, 0)
    bench.seq += 1
    follow = TokenRow(
        request_id=REQUEST,
        choice=0,
        attempt=attempt(1),
        offset=0,
        details=TokenOutputs(count=1, token_ids=pack_ids([-1])),
        finish_reason=FinishReason.LENGTH,
    )
    (row,) = texts(bench.machine.on_tokens(batch(bench.seq, follow), 0.0))
    assert covered([row]) == (0, 1)
    assert (row.usage and row.usage.completion_tokens) == 0


def test_columns_have_the_outputs_that_the_stream_has() -> None:
    m, numbers = Detokenizer(HERE, decode, requests_max=4), (5, 6, 7)
    for number in numbers:
        stream = TokenStream(
            owner=GATEWAY,
            prompt_tokens=3,
            details_from=None if number == 7 else 0,
            deadline_unix_ms=1_000_000,
        )
        introduction = TokenRow(
            request_id=RequestId(f"r{number}"),
            choice=0,
            attempt=attempt(1),
            offset=0,
            stream=stream,
            stream_number=number,
        )
        m.on_tokens(batch(number, introduction), 0.0)
    sent = columns(8, *((number, 0, "a") for number in numbers), logprobs=1)
    with_logprob, ids_only, none = texts(m.on_tokens(sent, 0.0))
    assert none.details is None
    outputs = [row.details and row.details.details for row in (with_logprob, ids_only)]
    ids = pack_ids([97])
    assert outputs == [
        TokenOutputs(count=1, token_ids=ids, logprobs=pack_floats([-0.5])),
        TokenOutputs(count=1, token_ids=ids),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_any_place_can_be_resumed_from(seed: int) -> None:
    """Rows of any size, repeated and overlapping; then everything again from any place."""
    print("seed", seed)
    chance = random.Random(seed)
    answer = "".join(chance.choices("aé日🎶E", k=40))
    bench = Bench(answer, StopStrings(strings=("EE",)), first=-chance.randrange(5), floats=1500)
    first, length = bench.stream.details_from or 0, len(bench.answer)
    at, received = first, list[TextRow]()
    while at < length:
        start = chance.randint(first, at)
        stop = min(length, at + chance.randint(1, 9))
        for low, high in ((start, min(0, stop)), (max(0, start), stop)):
            if low < high:
                received += bench.push(low, high, FinishReason.LENGTH if high == length else None)
        at = stop
    begin, end = covered(received)
    text = "".join(row.text for row in received)
    assert begin == first
    assert received[-1].finish_reason is not None
    again = bench.resume(0, None)
    assert (covered(again), "".join(row.text for row in again)) == ((first, end), text)
    sizes = [row.details.size_bytes for row in again if row.details]
    assert max(sizes) <= PIECE_BYTES + 1
    place, token = len(text[: len(text) // 2].encode()), chance.randint(first, end)
    rest = bench.resume(place, token)
    assert covered(rest) == (token, end)
    assert "".join(row.text for row in rest) == text[len(text) // 2 :]
    assert rest[-1].finish_reason == received[-1].finish_reason
    assert bench.resume(0, end + 1) == []
