"""Writers of chunks and of logprobs by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from antiphon.gateway.http.core.logprobs import text_logprobs
from antiphon.gateway.http.core.writer import event
from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
from antiphon.gateway.http.openai.schema import ChatChunkChoice, Delta, OpenAiChunk
from antiphon.gateway.http.openai.write import ChatResponseWriter, CompletionHeader
from antiphon.gateway.owner.actions import TextDelta
from antiphon.wire.codec import pack_ids
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, pack_floats

if TYPE_CHECKING:
    from antiphon.gateway.stream.stream import RequestStream

HEADER = CompletionHeader(id='id "1"', created=7, model="models/\\x", weight_version="default")


@pytest.mark.parametrize("text", ["a", ' "quoted" ', "\\", "\n\r\t", "\0", "ü 世 👋🏽", "{}</s>"])
def test_a_chunk_of_content_is_the_same_written_anew(text: str) -> None:
    stream = cast("RequestStream", SimpleNamespace(starts_in_reasoning=False))
    voice = ChatResponseWriter(HEADER, [stream], OpenAiResponseOptions(n=2), cached=False)
    for choice in (1, 0, 1):
        anew = OpenAiChunk(
            id=HEADER.id,
            object="chat.completion.chunk",
            created=HEADER.created,
            model=HEADER.model,
            choices=[ChatChunkChoice(index=choice, delta=Delta(content=text))],
        )
        said = TextDelta(choice, 0, text)
        assert voice.chunks(0, [said]) == event(msgspec.json.encode(anew))
    assert voice.chunks(0, [TextDelta(0, 0, "")]) == b""


def test_the_likeliest_come_first_and_one_text_keeps_the_likelier() -> None:
    details = TokenOutputs(
        count=1,
        token_ids=pack_ids([3]),
        logprobs=pack_floats([-0.5]),
        top_ids=pack_ids([3, 1, 2]),
        top_logprobs=pack_floats([-0.5, -1.5, -2.5]),
    )
    piece = TokenOutputsChunk(offset=0, details=details, texts={1: "\ufffd", 2: "\ufffd", 3: "a"})
    found = text_logprobs(piece, 0)
    assert found is not None
    assert found.top_logprobs is not None
    (top,) = found.top_logprobs
    assert list((top or {}).items()) == [("a", -0.5), ("\ufffd", -1.5)]
