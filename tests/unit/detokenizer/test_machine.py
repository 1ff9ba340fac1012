"""The detokenizer accepts a row only at the next offset of the current attempt."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from tests.support.services import process

from antiphon.detokenizer.choice import PIECE_BYTES
from antiphon.detokenizer.machine import (
    BATCH_BYTES_MAX,
    CLOSED_S,
    Action,
    Detokenizer,
    SendStop,
)
from antiphon.wire.base import Attempt, FinishReason, Process, Term
from antiphon.wire.codec import encode, pack_ids, pack_numbers, unpack_ids
from antiphon.wire.command import ResendTokens
from antiphon.wire.ids import Incarnation, RequestId
from antiphon.wire.sampling import StopStrings
from antiphon.wire.seal import DETAILS_BYTES_MAX, SealAttempts, SealedRequest, SealRequest
from antiphon.wire.submit import OpenList, OpenRequest
from antiphon.wire.text import ChoiceCursor, Origin, ResumeText, TextBatch, TextRow
from antiphon.wire.token_outputs import TokenOutputs, pack_floats
from antiphon.wire.tokens import TokenBatch, TokenColumns, TokenRow, TokenStep, TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence


HERE, WORKER, GATEWAY = process("detokenizer-0"), process("worker-0"), process("gateway-0")
REQUEST = RequestId("r")
NO_STOP = StopStrings()


def attempt(n: int) -> Attempt:
    return Attempt(term=Term(number=1, scheduler=process("scheduler-0")), n=n)


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    return bytes(ids).decode(errors="replace")


def machine() -> Detokenizer:
    return Detokenizer(HERE, decode, requests_max=4)


def row(
    text: str,
    offset: int = 0,
    *,
    n: int = 1,
    first: bool | None = None,
    stop: StopStrings = NO_STOP,
    finish: FinishReason | None = None,
    continues: Attempt | None = None,
    request_id: RequestId = REQUEST,
    weights: str | None = None,
    number: int | None = None,
    resume_ms: int = 0,
    owner: Process = GATEWAY,
) -> TokenRow:
    stream = TokenStream(
        owner=owner,
        prompt_tokens=3,
        stop=stop,
        deadline_unix_ms=1_000_000,
        continues=continues,
        resume_ms=resume_ms,
    )
    begins = offset == 0 if first is None else first
    return TokenRow(
        request_id=request_id,
        choice=0,
        attempt=attempt(n),
        offset=offset,
        token_ids=pack_ids(list(text.encode())),
        stream=stream if begins else None,
        weights=weights,
        finish_reason=finish,
        stream_number=number,
    )


def bound_to(incarnation: Incarnation, first: TokenRow) -> TokenRow:
    assert first.stream is not None
    return replace(first, stream=replace(first.stream, detokenizer_incarnation=incarnation))


def batch(seq: int, *rows: TokenRow) -> TokenBatch:
    return TokenBatch(worker=WORKER, seq=seq, step=seq, rows=rows)


def columns(seq: int, *tokens: tuple[int, int, str], logprobs: int = 0) -> TokenBatch:
    """A batch of plain rows: number, offset and letter; the first ones with logprobs."""
    numbers, offsets, letters = zip(*tokens, strict=True)
    both = TokenColumns(
        streams=pack_numbers(numbers),
        offsets=pack_ids(offsets),
        token_ids=pack_ids(map(ord, letters)),
        logprobs=pack_floats(-0.5 - n for n in range(logprobs)),
    )
    return TokenBatch(worker=WORKER, seq=seq, step=seq, columns=both)


def sealed(m: Detokenizer, n: int) -> SealedRequest:
    leader, asked = attempt(n).term, SealRequest(request_id=REQUEST, attempt=attempt(n))
    (found,) = m.on_seal(SealAttempts(leader=leader, requests=(asked,)), 1_000_000).requests
    return found


def begun(*rows: TokenRow) -> Detokenizer:
    """A machine that has applied the first batch of the worker."""
    m = machine()
    m.on_tokens(batch(1, *rows), 0.0)
    return m


def resumed(m: Detokenizer, text_offset: int | None = None) -> tuple[int, list[TextRow]]:
    """The count that a resume returns, and what it sends; from an offset of `REQUEST`, if any."""
    cursor = ChoiceCursor(request_id=REQUEST, choice=0, text_offset=text_offset or 0)
    places = () if text_offset is None else (cursor,)
    count, actions = m.on_resume(ResumeText(detokenizer=HERE, gateway=GATEWAY, places=places))
    return count, texts(actions)


def texts(actions: Sequence[Action]) -> list[TextRow]:
    return [row for a in actions if isinstance(a, TextBatch) for row in a.rows]


def open_list(version: int, *ids: RequestId, closed: tuple[RequestId, ...] = ()) -> OpenList:
    return OpenList(
        model="m",  # pyright: ignore[reportArgumentType]
        owner=GATEWAY,
        version=version,
        whole=not closed,
        opened=tuple(OpenRequest(request_id=i, deadline_unix_ms=1) for i in ids),
        closed=closed,
        not_after_unix_ms=1,
    )


def test_text_has_its_byte_offset():
    m = machine()
    first = texts(m.on_tokens(batch(1, row("né")), 0.0))
    second = texts(m.on_tokens(batch(2, row("x", 3)), 0.0))
    assert [(r.text_offset, r.text) for r in first + second] == [(0, "né"), (3, "x")]


def test_repeated_row_sends_nothing_twice():
    m = begun(row("ab"))
    assert texts(m.on_tokens(batch(1, row("ab")), 0.0)) == []
    assert [r.text for r in texts(m.on_tokens(batch(2, row("bc", 1)), 0.0))] == ["c"]


def test_a_gap_is_asked_for_from_the_next_offset_and_its_rows_wait():
    m = begun(row("ab"))
    (resend,) = m.on_tokens(batch(3, row("d", 3)), 1.0)
    assert isinstance(resend, ResendTokens)
    assert [(p.request_id, p.offset) for p in resend.places] == [(REQUEST, 2)]
    assert [r.text for r in texts(m.on_tokens(batch(4, row("cd", 2)), 1.0))] == ["cd"]


def test_a_lost_tail_shows_in_the_heartbeat():
    m = begun(row("ab"))
    assert m.on_worker_seq(WORKER, 1, 1.0) == []
    assert isinstance(m.on_worker_seq(WORKER, 2, 1.0)[0], ResendTokens)


def test_a_gap_that_comes_too_soon_to_ask_about_is_asked_about_later():
    m = begun(row("ab"))
    assert m.on_tokens(batch(3, row("d", 3)), 1.0)
    assert m.on_tokens(batch(5), 1.1) == []
    assert m.on_tick(1.2, unix_ms=0) == []
    assert isinstance(m.on_tick(1.6, unix_ms=0)[0], ResendTokens)
    assert m.on_tick(2.6, unix_ms=0) == []


def test_lower_attempt_is_stopped_and_ignored():
    m = begun(row("ab", n=2))
    (stop,) = m.on_tokens(batch(2, row("zz", n=1)), 0.0)
    assert isinstance(stop, SendStop)
    assert stop.stop.attempt == attempt(1)
    assert stop.stop.choice is None
    assert m.on_tokens(batch(3, row("zz", n=1)), 0.1) == []


def test_an_attempt_that_continues_keeps_text_and_one_that_does_not_begins_again():
    m = begun(row("ab", n=1))
    going_on = row("c", 2, n=2, first=True, continues=attempt(1))
    more = texts(m.on_tokens(batch(2, going_on), 0.0))
    assert [(r.text_offset, r.text) for r in more] == [(2, "c")]
    again = texts(m.on_tokens(batch(3, row("xyz", n=3)), 0.0))
    assert [(r.text_offset, r.text) for r in again] == [(0, "xyz")]


def test_an_attempt_of_an_earlier_process_of_this_name_is_not_accepted():
    """Its tokens were fixed there: a worker that wakes up sends more than was sealed."""
    m = machine()
    theirs, ours = process("detokenizer-0", "before").incarnation, HERE.incarnation
    assert texts(m.on_tokens(batch(1, bound_to(theirs, row("abz"))), 0.0)) == []
    assert not m.requests
    going_on = bound_to(ours, row("abc", n=2, continues=attempt(1)))
    (more,) = texts(m.on_tokens(batch(2, going_on), 0.0))
    assert (more.attempt, more.text) == (attempt(2), "abc")


@pytest.mark.parametrize(("text", "whole"), [("ab", False), ("abc", True)])
def test_an_attempt_is_sealed_without_output_until_it_has_all_that_it_continues(
    text: str, *, whole: bool
):
    """What continues less than its gateway has shown would go on with other tokens."""
    begins = row(text, n=2, continues=attempt(1))
    assert begins.stream is not None
    m = begun(replace(begins, stream=replace(begins.stream, continued=(3,))))
    assert not sealed(m, 1).sealed
    found = sealed(m, 2)
    assert found.sealed
    assert found.attempt == (attempt(2) if whole else None)
    outputs = [choice.output_ids for choice in found.choices]
    assert outputs == ([pack_ids(list(b"abc"))] if whole else [])


def detailed(text: str, hidden_bytes: int) -> TokenRow:
    """A row whose tokens have so many bytes of hidden states."""
    plain = row(text)
    outputs = TokenOutputs(count=len(text), token_ids=plain.token_ids, hidden=bytes(hidden_bytes))
    assert plain.stream is not None
    return replace(plain, details=outputs, stream=replace(plain.stream, details_from=0))


@pytest.mark.parametrize(
    ("hidden_bytes", "details", "size_bytes"),
    [
        (3_000, [3_012], None),
        (3_000_000, [None], None),
        (DETAILS_BYTES_MAX + 3, [], DETAILS_BYTES_MAX + 15),
    ],
)
def test_sealed_token_outputs_stay_where_they_do_not_fit_into_a_message(
    hidden_bytes: int, details: list[int | None], size_bytes: int | None
):
    """Up to a limit: beyond it the request is not continued."""
    m = begun(detailed("abc", hidden_bytes))
    found = sealed(m, 1)
    sizes = [each.details and each.details.size_bytes for each in found.choices]
    assert (sizes, found.size_bytes) == (details, size_bytes)
    if details:
        assert found.choices[0].output_ids == pack_ids(list(b"abc"))


def test_stop_string_cuts_text_and_usage_and_stops_the_worker():
    m = machine()
    stops = StopStrings(strings=("cd",))
    actions = m.on_tokens(batch(1, row("abcdef", stop=stops)), 0.0)
    (out,) = texts(actions)
    assert (out.text, out.finish_reason, out.matched_stop) == ("ab", FinishReason.STOP, "cd")
    assert (out.usage and out.usage.completion_tokens) == 4
    (stop,) = [a for a in actions if isinstance(a, SendStop)]
    assert (stop.stop.choice, stop.stop.offset) == (0, 4)
    assert actions[0] == stop, "the client gets the end before the worker gets the stop"
    assert m.on_tokens(batch(2, row("gh", 6)), 0.1) == []


def test_the_end_shows_what_was_held_back():
    m = machine()
    stops = StopStrings(strings=("cd",))
    (out,) = texts(m.on_tokens(batch(1, row("abc", stop=stops, finish=FinishReason.LENGTH)), 0.0))
    assert (out.text, out.finish_reason) == ("abc", FinishReason.LENGTH)


def test_resume_sends_everything_beyond_the_offsets_and_the_end():
    m = begun(row("abc", finish=FinishReason.STOP))
    m.on_tokens(batch(2, row("xy", request_id=RequestId("s"))), 0.0)
    count, rows = resumed(m, 1)
    out = {r.request_id: (r.text_offset, r.text, r.finish_reason) for r in rows}
    assert count == 2
    assert out == {REQUEST: (1, "bc", FinishReason.STOP), "s": (0, "xy", None)}


def test_a_resume_of_much_text_comes_in_messages_of_bounded_size():
    token_text = "€uro " * 10
    m = Detokenizer(HERE, lambda ids, _: token_text * len(ids), requests_max=8)
    tokens = "t" * 3_000
    truth = token_text * len(tokens)  # three bytes a character at the borders of the pieces
    for i in range(8):
        out = row(tokens, request_id=RequestId(str(i)), finish=FinishReason.LENGTH)
        m.on_tokens(batch(i + 1, out), 0.0)
    before = m.sent[GATEWAY.instance]
    _, actions = m.on_resume(ResumeText(detokenizer=HERE, gateway=GATEWAY))
    batches = [a for a in actions if isinstance(a, TextBatch)]
    assert [b.seq for b in batches] == [before + n + 1 for n in range(len(batches))]
    assert max(len(encode(b)) for b in batches) <= BATCH_BYTES_MAX + 1024
    shown = dict.fromkeys(m.requests, "")
    for out in texts(actions):
        assert out.text_offset == len(shown[out.request_id].encode())
        shown[out.request_id] += out.text
        assert (out.finish_reason is not None) == (shown[out.request_id] == truth)
    assert set(shown.values()) == {truth}


def test_rows_bring_the_ids_of_their_text_once_and_a_resume_brings_the_missing_ones():
    m = begun(row("añ", stop=StopStrings(strings=("bc",))))
    (held,) = texts(m.on_tokens(batch(2, row("zb", 3)), 0.0))
    (end,) = texts(m.on_tokens(batch(3, row("x", 5, finish=FinishReason.LENGTH)), 0.0))
    assert (held.text, held.tokens, unpack_ids(held.ids)) == ("z", 5, array("i", list(b"zb")))
    assert (end.text, end.tokens, unpack_ids(end.ids)) == ("bx", 6, array("i", list(b"x")))
    cursor = ChoiceCursor(request_id=REQUEST, choice=0, text_offset=4, tokens=5)
    _, actions = m.on_resume(ResumeText(detokenizer=HERE, gateway=GATEWAY, places=(cursor,)))
    (again,) = texts(actions)
    assert (again.text, again.tokens, again.ids) == ("bx", 6, end.ids)
    (whole,) = resumed(m)[1]
    assert (whole.text, whole.ids) == ("añzbx", pack_ids("añzbx".encode()))


def test_ids_of_much_text_come_in_rows_of_bounded_size_before_the_text():
    m = Detokenizer(HERE, lambda ids, _: "t" * len(ids), requests_max=8)
    tokens = 3 * PIECE_BYTES // 4 + 5
    m.on_tokens(batch(1, row("t" * tokens)), 0.0)
    rows = resumed(m)[1]
    ends = [PIECE_BYTES // 4 * n for n in (1, 2, 3)] + [tokens]
    assert [each.tokens for each in rows] == ends
    assert [len(each.ids) for each in rows] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 20]
    assert [len(each.text) for each in rows] == [0, 0, 0, tokens]


def test_output_sealed_by_its_owner_is_not_continued_from_what_was_accepted_here():
    """This detokenizer had accepted more than the owner was sent."""
    m = begun(row("abcd"))
    again = row("ab", n=2, continues=attempt(1))
    assert again.stream is not None
    stream = replace(again.stream, owner_sealed=True)
    (first,) = texts(m.on_tokens(batch(2, replace(again, stream=stream)), 0.0))
    assert (first.text_offset, first.text, first.tokens) == (0, "ab", 2)


def test_a_place_inside_a_character_is_another_attempts_and_hurts_no_other_request():
    m = begun(row("€", n=2), row("xy", request_id=RequestId("s")))
    assert [r.request_id for r in resumed(m, 1)[1]] == ["s"]


def test_seq_goes_on_for_a_gateway_that_was_thought_dead():
    """It would take a new beginning for old news, and not see the loss of a tail."""
    m = begun(row("ab"))
    m.on_owner_died(GATEWAY, 0.0)
    m.on_open_list(open_list(1, REQUEST), 8.0)
    (out,) = [a for a in m.on_tokens(batch(2, row("ab", n=2)), 9.0) if isinstance(a, TextBatch)]
    assert out.seq == 2


def test_another_life_of_the_gateway_receives_nothing():
    m = begun(row("abc"))
    reborn = process("gateway-0", "2")
    assert m.on_resume(ResumeText(detokenizer=HERE, gateway=reborn)) == (0, [])


def test_a_closed_request_is_forgotten_at_once():
    m = begun(row("abc", finish=FinishReason.STOP))
    m.on_open_list(open_list(1, closed=(REQUEST,)), 0.0)
    assert m.requests == {}


def test_a_request_that_its_owner_does_not_list_is_stopped_after_a_while():
    m = begun(row("abc"))
    assert m.on_open_list(open_list(1, REQUEST), 1.0) == []
    assert m.on_open_list(open_list(2), 2.0) == []
    (stop,) = m.on_open_list(open_list(3), 4.0)
    assert isinstance(stop, SendStop)
    assert m.requests == {}


def test_an_old_open_list_is_not_believed():
    m = begun(row("abc"))
    m.on_open_list(open_list(5, REQUEST), 0.0)
    m.on_open_list(open_list(4, closed=(REQUEST,)), 0.0)
    assert REQUEST in m.requests


def test_one_request_too_many_ends_with_a_typed_error():
    m = machine()
    rows = [row("a", request_id=RequestId(str(i))) for i in range(5)]
    actions = m.on_tokens(batch(1, *rows), 0.0)
    refused = [r for r in texts(actions) if r.error is not None]
    assert [(r.request_id, r.error and r.error.code) for r in refused] == [("4", "overloaded")]
    assert len(m.requests) == 4


def broken(error: type[Exception] = RuntimeError) -> Detokenizer:
    """A machine whose decoder fails on `!`."""

    def fail(ids: Sequence[int], skip_special_tokens: bool) -> str:
        if ord("!") in ids:
            raise error
        return decode(ids, skip_special_tokens)

    return Detokenizer(HERE, fail, requests_max=4)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_failing_row_ends_only_its_own_request(
    error: type[Exception], caplog: pytest.LogCaptureFixture
):
    m = broken(error)
    bad, unasked = RequestId("bad"), replace(row("c", request_id=RequestId("odd")), choice=7)
    rows = [row("a"), row("b!", request_id=bad), unasked, row("d", request_id=RequestId("s"))]
    actions = m.on_tokens(batch(1, *rows), 0.0)
    out = [(r.request_id, r.text, r.error and r.error.code) for r in texts(actions)]
    assert out == [
        (REQUEST, "a", None), ("bad", "", "internal"), ("odd", "", "internal"), ("s", "d", None),
    ]  # fmt: skip
    stops = [a.stop for a in actions if isinstance(a, SendStop)]
    assert [(stop.request_id, stop.choice) for stop in stops] == [("bad", None), ("odd", None)]
    assert len(caplog.records) == 2
    assert m.live == 2


def test_a_request_that_failed_stays_so():
    m = broken()
    m.on_tokens(batch(1, row("a!")), 0.0)
    (stop,) = m.on_tokens(batch(2, row("b", 2)), 1.0)
    assert isinstance(stop, SendStop)
    assert [r.error and r.error.code for r in resumed(m)[1]] == ["internal"]


def test_what_is_long_past_its_deadline_is_forgotten():
    m = begun(row("abc"))
    m.on_tick(1.0, unix_ms=1_009_000)
    assert m.requests
    m.on_tick(1.0, unix_ms=1_011_000)
    assert not m.requests


@pytest.mark.parametrize("seed", range(100))
def test_text_is_whole_whatever_is_lost_repeated_or_late(seed: int):
    """A worker that answers resends, over a network that loses, repeats and swaps batches.

    Single tokens mostly come in columns.
    """
    chance = random.Random(seed)
    truth = "".join(chance.choice("aé€𝄞 \n") for _ in range(60))
    ids = truth.encode()
    m, shown, sent, seq, now = machine(), bytearray(), 0, 0, 0.0
    network: list[TokenBatch] = []
    for _ in range(2000):
        now += 0.1
        size = min(chance.choice([1, 1, 1, 2, 4, 7]), len(ids) - sent)
        if size or chance.random() < 0.1:
            seq += 1
            finish = FinishReason.STOP if sent + size == len(ids) else None
            if size == 1 and sent and finish is None and chance.random() < 0.8:
                network.append(columns(seq, (5, sent, chr(ids[sent]))))
            else:
                piece = row("", sent, finish=finish, number=5)
                piece = replace(piece, token_ids=pack_ids(list(ids[sent : sent + size])))
                network.append(batch(seq, piece))
            sent += size
        if len(network) > 1 and chance.random() < 0.3:
            network[-1], network[-2] = network[-2], network[-1]
        arrived = network.pop(0) if network and chance.random() < 0.7 else None
        if arrived is None:
            actions = m.on_worker_seq(WORKER, seq, now)
        elif chance.random() < 0.2:
            continue
        else:
            actions = m.on_tokens(arrived, now)
            if chance.random() < 0.2:
                actions += m.on_tokens(arrived, now)
        for action in actions:
            if isinstance(action, ResendTokens):
                places = {p.request_id: p.offset for p in action.places}
                sent = min(sent, places.get(REQUEST, 0))
        for out in texts(actions):
            assert out.text_offset == len(shown), f"seed {seed}"
            shown += out.text.encode()
            if out.finish_reason is not None:
                assert shown.decode() == truth, f"seed {seed}"
                return
    pytest.fail(f"seed {seed}: never ended; shown {len(shown)} of {len(ids)} bytes")


def test_rows_that_outlive_their_gateway_do_not_begin_its_requests_anew():
    m = begun(row("abc"))
    m.on_owner_died(GATEWAY, 0.0)
    assert m.on_tokens(batch(2, row("abcd")), 1.0) == []
    assert m.requests == {}
    m.on_open_list(open_list(1, REQUEST), 2.0)  # it was only frozen
    assert [r.text for r in texts(m.on_tokens(batch(3, row("abcde")), 2.0))] == ["abcde"]


def test_request_of_a_dead_gateway_is_kept_for_its_window() -> None:
    m = begun(row("abc", resume_ms=5000))
    assert m.on_owner_died(GATEWAY, 1.0) == []
    m.on_tokens(batch(2, row("d", 3)), 2.0)
    assert m.on_tick(5.9, 0) == []
    assert m.requests[REQUEST].choices[0].text_bytes == 4
    (stop,) = m.on_tick(6.0, 0)
    assert isinstance(stop, SendStop)
    assert m.requests == {}


def test_closed_request_that_can_be_resumed_is_kept_for_a_gateway_that_has_adopted_it() -> None:
    """The gateway that had it learns that sooner than this process, if the worker is dead."""
    m = begun(row("abc", resume_ms=60_000))
    m.on_open_list(open_list(1, closed=(REQUEST,)), 1.0)
    m.on_open_list(open_list(2), 4.0)
    assert m.on_tick(0.9 + CLOSED_S, 0) == []
    assert m.requests[REQUEST].choices[0].text_bytes == 3
    (stop,) = m.on_tick(1.0 + CLOSED_S, 0)
    assert isinstance(stop, SendStop)
    assert m.requests == {}


def test_gateway_that_adopts_a_request_is_sent_all_of_its_text() -> None:
    m = begun(row("abc", resume_ms=5000, finish=FinishReason.STOP))
    m.on_owner_died(GATEWAY, 1.0)
    other = process("gateway-1")
    again = row(
        "abc", n=2, continues=attempt(1), resume_ms=5000, owner=other, finish=FinishReason.STOP
    )
    (sent,) = [a for a in m.on_tokens(batch(2, again), 2.0) if isinstance(a, TextBatch)]
    assert sent.gateway == other
    assert [(r.text_offset, r.text, r.finish_reason) for r in sent.rows] == [
        (0, "abc", FinishReason.STOP)
    ]
    assert m.on_tick(60.0, 0) == []


def origins(*marks: tuple[int, str]) -> tuple[Origin, ...]:
    worker = WORKER.instance
    return tuple(Origin(start=start, worker=worker, weights=weights) for start, weights in marks)


def test_origins_are_sent_when_they_change():
    m = machine()
    (first,) = texts(m.on_tokens(batch(1, row("ab", weights="v1")), 0.0))
    assert first.origins == origins((0, "v1"))
    (same,) = texts(m.on_tokens(batch(2, row("c", 2)), 0.0))
    assert same.origins == ()
    (renamed,) = texts(m.on_tokens(batch(3, row("d", 3, weights="v2")), 0.0))
    assert renamed.origins == origins((0, "v1"), (3, "v2"))
    # What is sent again adds no origin.
    m.on_tokens(batch(4, row("ab", weights="v1", first=False)), 0.0)
    m.on_tokens(batch(5, row("cd", 2, weights="v1")), 0.0)
    _, (again,) = resumed(m, 2)
    assert (again.text, again.origins) == ("cd", renamed.origins)
    (end,) = texts(m.on_tokens(batch(6, row("", 4, finish=FinishReason.LENGTH)), 0.0))
    assert end.origins == renamed.origins


def test_an_attempt_that_goes_on_elsewhere_adds_its_origin():
    m = begun(row("ab", weights="v1"))
    # Its new worker sends what was sealed first, without its origin.
    sealed = row("ab", n=2, continues=attempt(1))
    elsewhere = process("worker-1")
    rows = (sealed, row("cd", 2, n=2, weights="v1"))
    actions = m.on_tokens(TokenBatch(worker=elsewhere, seq=1, step=1, rows=rows), 0.0)
    last = texts(actions)[-1]
    there = Origin(start=2, worker=elsewhere.instance, weights="v1")
    assert last.origins == (*origins((0, "v1")), there)


def test_continued_attempt_counts_what_a_dead_detokenizer_had():
    m = begun(row("ab", n=2), row("c", 2, n=2, weights="v2"))
    (end,) = texts(m.on_tokens(batch(2, row("", 3, n=2, finish=FinishReason.LENGTH)), 0.0))
    assert end.origins == origins((0, "v2"))


def step(seq: int, *letters: str) -> TokenStep:
    ids = pack_ids([ord(letter) for letter in letters])
    return TokenStep(worker=WORKER, seq=seq, step=seq, token_ids=ids)


def test_step_adds_a_token_to_each_row_of_the_batch_before():
    m, other = machine(), RequestId("other")
    m.on_tokens(batch(1, row("ab"), row("x", request_id=other)), 0.0)
    steps = (step(2, "c", "y"), step(3, "d", "z"))
    out = [texts(m.on_tokens(each, 0.0)) for each in steps]
    assert [[(r.request_id, r.text_offset, r.text) for r in rows] for rows in out] == [
        [(REQUEST, 2, "c"), (other, 1, "y")],
        [(REQUEST, 3, "d"), (other, 2, "z")],
    ]


@pytest.mark.parametrize(
    "lost", [step(4, "e"), step(2, "c", "d"), step(2)], ids=["gap", "too many", "too few"]
)
def test_step_after_a_gap_is_requested_until_it_arrives(lost: TokenStep):
    m = begun(row("ab"))
    (asked,) = m.on_tokens(lost, 1.0)
    assert isinstance(asked, ResendTokens)
    assert [place.offset for place in asked.places] == [2]
    assert m.on_tokens(step(lost.seq + 1, "f"), 1.1) == []  # asked just now
    (asked,) = m.on_tick(2.0, 0)
    assert isinstance(asked, ResendTokens)
    assert [r.text for r in texts(m.on_tokens(batch(6, row("cdef", 2)), 2.0))] == ["cdef"]
    assert [r.text for r in texts(m.on_tokens(step(7, "g"), 2.0))] == ["g"]


def test_step_of_an_unknown_worker_is_requested():
    m = begun(row("ab"))
    m.on_worker_died(WORKER)
    (asked,) = m.on_tokens(step(2, "c"), 1.0)
    assert isinstance(asked, ResendTokens)


OTHER = RequestId("other")


def numbered() -> Detokenizer:
    """A machine with two requests whose streams have the numbers 5 and 7."""
    return begun(row("ab", number=5), row("x", request_id=OTHER, number=7))


def test_columns_add_a_token_to_each_numbered_stream():
    m = numbered()
    out = [
        texts(m.on_tokens(each, 0.0))
        for each in (columns(2, (7, 1, "y"), (5, 2, "c")), columns(3, (5, 3, "d"), (7, 2, "z")))
    ]
    assert [[(r.request_id, r.text_offset, r.text) for r in rows] for rows in out] == [
        [(OTHER, 1, "y"), (REQUEST, 2, "c")],
        [(REQUEST, 3, "d"), (OTHER, 2, "z")],
    ]


def test_columns_come_before_the_rows_of_their_message():
    m = numbered()
    both = replace(columns(2, (5, 2, "c"), (7, 1, "y")), rows=(row("de", 3),))
    assert [(r.request_id, r.text) for r in texts(m.on_tokens(both, 0.0))] == [
        (REQUEST, "c"),
        (OTHER, "y"),
        (REQUEST, "de"),
    ]


def test_columns_repeated_or_after_a_gap_are_as_rows_are():
    m = numbered()
    assert texts(m.on_tokens(columns(1, (5, 1, "b")), 0.0)) == []
    actions = m.on_tokens(columns(3, (5, 3, "d"), (7, 1, "y")), 1.0)
    (asked, *_) = actions
    assert isinstance(asked, ResendTokens)
    assert {(p.request_id, p.offset) for p in asked.places} == {(REQUEST, 2), (OTHER, 2)}
    assert [r.text for r in texts(actions)] == ["y"]


def test_columns_of_an_unknown_stream_are_requested_until_its_row_arrives():
    m = numbered()
    third = RequestId("third")
    actions = m.on_tokens(columns(2, (9, 1, "q"), (5, 2, "c")), 1.0)
    (asked, *_) = actions
    assert isinstance(asked, ResendTokens)
    assert [r.text for r in texts(actions)] == ["c"]
    assert m.on_tokens(columns(3, (9, 2, "r")), 1.1) == []  # requested just now
    (asked,) = m.on_tick(2.0, 0)
    assert isinstance(asked, ResendTokens)
    m.on_tokens(batch(4, row("pqr", request_id=third, number=9)), 2.0)
    assert [r.text for r in texts(m.on_tokens(columns(5, (9, 3, "s")), 2.1))] == ["s"]


def test_columns_of_an_ended_choice_stop_it_again_and_request_nothing():
    m = begun(row("ab", number=5, stop=StopStrings(strings=("b",))))
    (stop,) = m.on_tokens(columns(2, (5, 2, "c")), 9.0)
    assert isinstance(stop, SendStop)
    assert (stop.stop.choice, stop.stop.offset) == (0, 2)


def test_columns_of_a_superseded_attempt_stop_it():
    m = begun(row("ab", number=5))
    m.on_tokens(batch(2, row("AB", n=2, number=6)), 0.0)
    (stop,) = m.on_tokens(columns(3, (5, 2, "c")), 0.0)
    assert isinstance(stop, SendStop)
    assert (stop.stop.attempt, stop.stop.choice) == (attempt(1), None)
    assert [r.text for r in texts(m.on_tokens(columns(4, (6, 2, "C")), 0.0))] == ["C"]


def test_column_that_fails_ends_only_its_own_request():
    m = broken()
    m.on_tokens(batch(1, row("ab", number=5), row("x", request_id=OTHER, number=7)), 0.0)
    rows = texts(m.on_tokens(columns(2, (5, 2, "!"), (7, 1, "y")), 1.0))
    assert [(r.request_id, r.error and r.error.code) for r in rows] == [
        (REQUEST, "internal"),
        (OTHER, None),
    ]


@pytest.mark.parametrize("ends", ["closed", "deadline", "owner", "unlisted", "worker"])
def test_stream_numbers_are_forgotten_with_their_request(ends: str):
    m = numbered()
    m.on_tokens(batch(2, row("AB", n=2, number=6)), 0.0)
    assert len(m._streams) == 3
    match ends:
        case "closed":
            m.on_open_list(open_list(1, closed=(REQUEST, OTHER)), 1.0)
        case "deadline":
            m.on_tick(1.0, unix_ms=1_011_000)
        case "owner":
            m.on_owner_died(GATEWAY, 0.0)
        case "unlisted":
            m.on_open_list(open_list(1), 100.0)
        case _:
            m.on_worker_died(WORKER)
    assert len(m._streams) == 0
    assert isinstance(m.on_tokens(columns(3, (7, 1, "y")), 200.0)[0], ResendTokens)
