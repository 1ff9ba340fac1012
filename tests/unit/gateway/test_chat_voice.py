"""A chunk of plain content is what it would be if all of it were written anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from antiphon.gateway.http.openai.chat_voice import ChatVoice
from antiphon.gateway.http.openai.replies import ChatChunk, ChatChunkChoice, Delta
from antiphon.gateway.http.openai.telling import Telling
from antiphon.gateway.http.openai.voice import Header
from antiphon.gateway.http.sse import event
from antiphon.gateway.owner.actions import Said

if TYPE_CHECKING:
    from antiphon.gateway.stream import Stream

HEADER = Header(id='id "1"', created=7, model="models/\\x", weight_version="default")


@pytest.mark.parametrize("text", ["a", ' "quoted" ', "\\", "\n\r\t", "\0", "ü 世 👋🏽", "{}</s>"])
def test_a_chunk_of_content_is_the_same_written_anew(text: str) -> None:
    stream = cast("Stream", SimpleNamespace(inside=False))
    voice = ChatVoice(HEADER, [stream], Telling(choices=2), cached=False)
    for choice in (1, 0, 1):
        anew = ChatChunk(
            id=HEADER.id,
            created=HEADER.created,
            model=HEADER.model,
            choices=[ChatChunkChoice(index=choice, delta=Delta(content=text))],
        )
        said = Said(choice, 0, text)
        assert voice.chunks(0, [said]) == event(msgspec.json.encode(anew))
    assert voice.chunks(0, [Said(0, 0, "")]) == b""
