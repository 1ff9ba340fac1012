"""A chunk of plain content is what it would be if all of it were written anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from antiphon.gateway.http.core.writer import event
from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
from antiphon.gateway.http.openai.replies import ChatChunkChoice, Delta, OpenAiChunk
from antiphon.gateway.http.openai.write import ChatResponseWriter, CompletionHeader
from antiphon.gateway.owner.actions import TextDelta

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
