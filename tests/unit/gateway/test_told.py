"""What /generate tells so far grows; each token is worked on once, however it comes."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.owner_world import MODEL, submission
from tests.support.clock import ManualClock

from antiphon.config.gateway import AccessConfig
from antiphon.config.tenants import Tenants
from antiphon.gateway.access.access import Access
from antiphon.gateway.http.core.meta_info import (
    GenerateOutputs,
    GenerateReplyWriter,
    GenerateResponseOptions,
)
from antiphon.gateway.http.native.parse import parse_generate
from antiphon.gateway.http.native.schema import GenerateBody
from antiphon.gateway.http.native.write import GenerateResponseWriter
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.requests.generation_request import GenerationRequest
from antiphon.gateway.stream.stream import RequestStream
from antiphon.telemetry.tracing import span
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids
from antiphon.wire.token_outputs import TokenOutput, TokenOutputs, TokenOutputsChunk, pack_floats

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK = GenerationRequest(api="native", model=None)
PROMPT = (7, 8, 9)
WORDS = ('"Hi"', "\n", "wörld", "👋", "\\", "", "!")
EVERYTHING = GenerateResponseOptions(
    logprobs=True, start=0, top=2, named_ids=(1,), texts=True, hidden="full", prompt_ids=True
)


def details(count: int) -> TokenOutputs:
    """Of two tokens of the prompt and then of the answer."""
    tops = [token + n for token in range(count) for n in (0, 1)]
    return TokenOutputs(
        count=count,
        token_ids=pack_ids([8, 9, *range(20, 18 + count)][:count]),
        logprobs=pack_floats(-0.5 * n for n in range(count)),
        top_ids=pack_ids(tops),
        top_logprobs=pack_floats(-float(token) for token in tops),
        named_logprobs=pack_floats(-0.25 * n for n in range(count)),
        hidden=pack_floats(float(n) for n in range(2 * count)),
    )


def said(every: TokenOutputs, start: int, stop: int) -> TextDelta:
    """Tokens `start` to `stop`, counted from the first of the prompt that is told of."""
    widths = [len(column) // every.count for column in every.columns]
    columns = (c[w * start : w * stop] for c, w in zip(every.columns, widths, strict=True))
    piece = TokenOutputsChunk(
        offset=start - 2,
        details=TokenOutputs.from_columns(stop - start, columns),
        texts={token: f"<{token}>" for token in range(60)},
    )
    text = "".join(WORDS[n % len(WORDS)] for n in range(max(0, start - 2), max(0, stop - 2)))
    return TextDelta(0, 0, text, None, piece)


def fields(told: GenerateReplyWriter) -> dict[str, object]:
    return json.loads(msgspec.json.encode(told.reply | told.meta))


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(3, 12),
    places=st.lists(st.integers(0, 12), max_size=6),
    hidden=st.sampled_from(["full", "last", ""]),
    start=st.integers(-1, 2),
)
def test_pieces_say_what_the_whole_says(count, places, hidden, start):
    telling = msgspec.structs.replace(EVERYTHING, hidden=hidden, start=start)
    every = details(count)
    whole = GenerateReplyWriter(telling, PROMPT)
    whole.add(said(every, 0, count))
    told = GenerateReplyWriter(telling, PROMPT)
    at = sorted({0, count, *(place % (count + 1) for place in places)})
    for a, b in itertools.pairwise(at):
        told.add(said(every, a, b))
    assert fields(told) == fields(whole)
    assert (told.ids, "".join(told.texts)) == (whole.ids, "".join(whole.texts))


def test_the_prompt_comes_first_and_its_first_token_follows_nothing():
    told = GenerateReplyWriter(EVERYTHING, PROMPT, "<7>")
    told.add(said(details(4), 0, 4))
    heard = fields(told)
    assert heard["text"] == "".join(WORDS[:2])
    assert heard["output_ids"] == [20, 21]
    assert heard["input_token_logprobs"] == [[None, 7, "<7>"], [0.0, 8, "<8>"], [-0.5, 9, "<9>"]]
    assert heard["input_top_logprobs"][0] is None  # type: ignore[index]
    assert heard["output_token_logprobs"] == [[-1.0, 20, "<20>"], [-1.5, 21, "<21>"]]
    assert heard["output_token_logprobs_length"] == 2
    assert heard["hidden_states"] == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [6.0, 7.0]]


def test_what_is_new_begins_where_it_was_told_to():
    told = GenerateReplyWriter(EVERYTHING, PROMPT)
    told.add(said(details(5), 0, 1))
    assert len(fields(told)["input_token_logprobs"]) == 2  # type: ignore[arg-type]
    told.restart()
    told.add(said(details(5), 1, 4))
    heard = fields(told)
    assert heard["input_token_logprobs"] == [[-0.5, 9, "<9>"]]
    assert heard["output_ids"] == [20, 21]
    assert told.tokens == 2
    told.restart()
    assert fields(told) == {"text": "", "output_ids": []}


def test_each_token_is_worked_on_once(monkeypatch: pytest.MonkeyPatch):
    """A stream of n events that each tell all so far costs n steps, not n * n."""
    worked_on = 0
    each = TokenOutputs.iter_tokens

    def counted(self: TokenOutputs) -> Iterator[TokenOutput]:
        nonlocal worked_on
        worked_on += self.count
        return each(self)

    monkeypatch.setattr(TokenOutputs, "iter_tokens", counted)
    count = 200
    every = details(count)
    told = GenerateReplyWriter(msgspec.structs.replace(EVERYTHING, hidden=""), PROMPT)
    for n in range(count):
        told.add(said(every, n, n + 1))
        msgspec.json.encode(told.reply | told.meta)
    assert worked_on == count
    assert len(told.ids) == count - 2


def voice(news: bool = False, **sampling: object) -> GenerateResponseWriter:
    body = msgspec.convert({"text": "abc", "sampling_params": sampling}, GenerateBody)
    hold = Access(AccessConfig(), Tenants(), ManualClock().now).admit(ASK, MODEL)
    submit = msgspec.structs.replace(submission("r", ManualClock()), prompt_ids=pack_ids(PROMPT))
    stream = RequestStream(
        submit, span("t", None), hold, api="native", received_at=0, submitted_at=0
    )
    parsed = parse_generate(body)
    outputs = GenerateOutputs(
        [stream],
        parsed.all_reply_options,
        firsts=[None],
        rank_of=lambda _: None,
        weight_version="",
    )
    return GenerateResponseWriter(parsed, outputs, incremental=news)


@pytest.mark.parametrize("news", [False, True])
def test_an_event_is_worth_so_many_tokens_but_for_the_first_and_the_end(news):
    told = voice(news, stream_interval=3)
    every = details(10)
    events = [told.chunks(0, [said(every, n, n + 1)]) for n in range(2, 10)]
    assert [bool(event) for event in events] == [n in (0, 3, 6) for n in range(8)]
    end = told.chunks(0, [Finished(0, FinishReason.LENGTH, None, 0)])
    replies = [json.loads(event.removeprefix(b"data: ")) for event in [*events, end] if event]
    counts = [reply["meta_info"]["completion_tokens"] for reply in replies]
    assert counts == [1, 4, 7, 8]
    lengths = [len(reply["output_ids"]) for reply in replies]
    assert lengths == ([1, 3, 3, 1] if news else counts)
