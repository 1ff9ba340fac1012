"""The reply of /generate grows; each token is formatted once, in a stream or whole."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

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
    """Of two tokens of the prompt and then of the output."""
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


def delta(every: TokenOutputs, start: int, stop: int) -> TextDelta:
    """Tokens `start` to `stop`, counted from the first of the prompt that has details."""
    widths = [len(column) // every.count for column in every.columns]
    columns = (c[w * start : w * stop] for c, w in zip(every.columns, widths, strict=True))
    piece = TokenOutputsChunk(
        offset=start - 2,
        details=TokenOutputs.from_columns(stop - start, columns),
        texts={token: f"<{token}>" for token in range(60)},
    )
    text = "".join(WORDS[n % len(WORDS)] for n in range(max(0, start - 2), max(0, stop - 2)))
    return TextDelta(0, 0, text, None, piece)


def fields(writer: GenerateReplyWriter) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(writer.reply | writer.meta))


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(3, 12),
    places=st.lists(st.integers(0, 12), max_size=6),
    hidden=st.sampled_from(["full", "last", ""]),
    start=st.integers(-1, 2),
)
def test_pieces_add_up_to_the_whole(count, places, hidden, start):
    options = msgspec.structs.replace(EVERYTHING, hidden=hidden, start=start)
    every = details(count)
    whole, joined = (GenerateReplyWriter(options, PROMPT) for _ in range(2))
    whole.add(delta(every, 0, count))
    at = sorted({0, count, *(place % (count + 1) for place in places)})
    for a, b in itertools.pairwise(at):
        joined.add(delta(every, a, b))
    assert fields(joined) == fields(whole)
    assert (joined.ids, "".join(joined.texts)) == (whole.ids, "".join(whole.texts))


def test_prompt_comes_first_and_its_first_token_has_no_logprob():
    writer = GenerateReplyWriter(EVERYTHING, PROMPT, "<7>")
    writer.add(delta(details(4), 0, 4))
    found = fields(writer)
    assert found["input_top_logprobs"][0] is None
    expected = {
        "text": "".join(WORDS[:2]),
        "output_ids": [20, 21],
        "input_token_logprobs": [[None, 7, "<7>"], [0.0, 8, "<8>"], [-0.5, 9, "<9>"]],
        "output_token_logprobs": [[-1.0, 20, "<20>"], [-1.5, 21, "<21>"]],
        "output_token_logprobs_length": 2,
        "hidden_states": [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [6.0, 7.0]],
    }
    assert expected.items() <= found.items()


def test_restarted_writer_has_only_what_is_new():
    writer = GenerateReplyWriter(EVERYTHING, PROMPT)
    writer.add(delta(details(5), 0, 1))
    assert len(fields(writer)["input_token_logprobs"]) == 2
    writer.restart()
    writer.add(delta(details(5), 1, 4))
    found = fields(writer)
    assert found["input_token_logprobs"] == [[-0.5, 9, "<9>"]]
    assert (found["output_ids"], writer.tokens) == ([20, 21], 2)
    writer.restart()
    assert fields(writer) == {"text": "", "output_ids": []}


def test_each_token_is_formatted_once(monkeypatch: pytest.MonkeyPatch):
    """A stream of n events that each repeat all output so far costs n steps, not n * n."""
    formatted = 0
    each = TokenOutputs.iter_tokens

    def counted(self: TokenOutputs) -> Iterator[TokenOutput]:
        nonlocal formatted
        formatted += self.count
        return each(self)

    monkeypatch.setattr(TokenOutputs, "iter_tokens", counted)
    count = 200
    every = details(count)
    writer = GenerateReplyWriter(msgspec.structs.replace(EVERYTHING, hidden=""), PROMPT)
    for n in range(count):
        writer.add(delta(every, n, n + 1))
        msgspec.json.encode(writer.reply | writer.meta)
    assert formatted == count
    assert len(writer.ids) == count - 2


def response_writer(incremental: bool, **sampling: object) -> GenerateResponseWriter:
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
    return GenerateResponseWriter(parsed, outputs, incremental=incremental)


@pytest.mark.parametrize("incremental", [False, True])
def test_stream_interval_counts_tokens_between_the_first_event_and_the_end(incremental):
    writer = response_writer(incremental, stream_interval=3)
    every = details(10)
    events = [writer.chunks(0, [delta(every, n, n + 1)]) for n in range(2, 10)]
    assert [bool(event) for event in events] == [n in (0, 3, 6) for n in range(8)]
    end = writer.chunks(0, [Finished(0, FinishReason.LENGTH, None, 0)])
    replies = [json.loads(event.removeprefix(b"data: ")) for event in [*events, end] if event]
    counts = [reply["meta_info"]["completion_tokens"] for reply in replies]
    assert counts == [1, 4, 7, 8]
    lengths = [len(reply["output_ids"]) for reply in replies]
    assert lengths == ([1, 3, 3, 1] if incremental else counts)
