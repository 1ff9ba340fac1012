"""How /generate tells its answers: whole, or so far, or what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.native.record import Record
from antiphon.gateway.http.native.replies import UNSET, GenerateReply
from antiphon.gateway.http.sse import DONE, event
from antiphon.gateway.http.voice import Voice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.chorus import Answer
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.http.native.record import Keep, RankOf
    from antiphon.gateway.owner.actions import Finished, Said
    from antiphon.gateway.stream import Stream
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError


class GenerateVoice(Voice):
    """POST /generate. An event tells all so far, unless `news` says only what is new."""

    def __init__(
        self,
        posted: Posted,
        streams: Sequence[Stream],
        *,
        firsts: Sequence[str | None],
        rank_of: RankOf,
        weight_version: str,
        news: bool,
        keep: Keep | None = None,
    ) -> None:
        self._posted = posted
        self._news = news
        self._record = Record(
            streams,
            posted.tellings,
            firsts=firsts,
            rank_of=rank_of,
            weight_version=weight_version,
            keep=keep,
        )
        self._told = self._record.told
        self._told_to = [0] * len(self._told)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object, or a list of them."""
        self._record.hear_all(answers)
        replies = [self._reply(index) for index in range(len(self._told))]
        return msgspec.json.encode(replies if self._posted.batch else replies[0])

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """One event for each answer that says enough."""
        met: dict[int, None] = {}
        for each in events:
            self._record.hear(prompt, each)
            met[self._record.index(prompt, each.choice)] = None
        return b"".join(self._event(index) for index in met if self._due(prompt, index))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The mark of the end."""
        return DONE

    def failure(self, error: EngineError) -> bytes:
        """The error, and the mark of the end."""
        return event(msgspec.json.encode(envelope(error))) + DONE

    async def keep(self) -> None:
        """Put by what a session goes on from."""
        await self._record.keep()

    def _due(self, prompt: int, index: int) -> bool:
        """Whether an answer has said so much that an event is worth it: its first token has."""
        told, before = self._told[index], self._told_to[index]
        enough = self._posted.tellings[prompt].interval if before else 1
        return told.finished is not None or told.tokens - before >= enough

    def _event(self, index: int) -> bytes:
        told = event(msgspec.json.encode(self._reply(index)))
        self._told_to[index] = self._told[index].tokens
        if self._news:
            self._told[index].restart()
        return told

    def _reply(self, index: int) -> GenerateReply:
        prompt = index // self._posted.asks[0].choices
        ids, telling = self._record.prompt_ids[prompt], self._posted.tellings[prompt]
        reply = GenerateReply(
            text="",
            output_ids=[],
            meta_info=self._record.meta_info(index),
            prompt_token_ids=list(ids) if telling.prompt_ids else UNSET,
            index=index if self._posted.batch else UNSET,
        )
        return msgspec.structs.replace(reply, **self._told[index].reply)
