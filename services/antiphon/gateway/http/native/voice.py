"""How /generate tells its answers: whole, or so far, or what is new."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.native.replies import (
    UNSET,
    GenerateReply,
    MetaInfo,
    finish_body,
)
from antiphon.gateway.http.native.told import Told
from antiphon.gateway.http.openai.replies import CachedTokensDetails
from antiphon.gateway.http.origins import weight_spans
from antiphon.gateway.http.sse import DONE, event
from antiphon.gateway.http.voice import Voice
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.gateway.chorus import Answer
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.stream import Stream
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import InstanceId

    Keep = Callable[[Stream, "GenerateVoice"], Awaitable[None]]


class GenerateVoice(Voice):
    """POST /generate. An event tells all so far, unless `news` says only what is new."""

    def __init__(
        self,
        posted: Posted,
        streams: Sequence[Stream],
        *,
        firsts: Sequence[str | None],
        rank_of: Callable[[InstanceId], int | None],
        weight_version: str,
        news: bool,
        keep: Keep | None = None,
    ) -> None:
        self._posted = posted
        self._streams = streams
        self._rank_of = rank_of
        self._weight_version = weight_version
        self._news = news
        self._keep = keep
        self._began = time.monotonic()
        self._choices = posted.asks[0].choices
        self._prompt_ids = [unpack_ids(stream.submit.prompt_ids) for stream in streams]
        self._told = [
            Told(telling, prompt_ids, first)
            for telling, prompt_ids, first in zip(
                posted.tellings, self._prompt_ids, firsts, strict=True
            )
            for _ in range(self._choices)
        ]
        self._told_to = [0] * len(self._told)
        self._cached = [0] * len(streams)

    @property
    def first_ids(self) -> list[int]:
        """The ids of the first answer, once all is told."""
        return self._told[0].ids

    @property
    def first_text(self) -> str:
        """Its text."""
        return "".join(self._told[0].texts)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object, or a list of them."""
        for prompt, answer in enumerate(answers):
            self._cached[prompt] = answer.usage.cached_tokens
            for choice, spoken in enumerate(answer.choices):
                for said in spoken.said:
                    self._told[prompt * self._choices + choice].know(said)
                for heard in (*spoken.said, spoken.end):
                    self._hear(prompt, prompt * self._choices + choice, heard)
        replies = [self._reply(index) for index in range(len(self._told))]
        return msgspec.json.encode(replies if self._posted.batch else replies[0])

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """One event for each answer that says enough."""
        met: dict[int, None] = {}
        for each in events:
            index = prompt * self._choices + each.choice
            self._hear(prompt, index, each)
            met[index] = None
        return b"".join(self._event(index) for index in met if self._due(prompt, index))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The mark of the end."""
        return DONE

    def failure(self, error: EngineError) -> bytes:
        """The error, and the mark of the end."""
        return event(msgspec.json.encode(envelope(error))) + DONE

    async def keep(self) -> None:
        """Put by what a session goes on from."""
        if self._keep is not None:
            await self._keep(self._streams[0], self)

    def _hear(self, prompt: int, index: int, heard: Said | Finished) -> None:
        if isinstance(heard, Finished):
            self._told[index].end(heard)
            return
        self._told[index].hear(heard)
        if heard.usage is not None:
            self._cached[prompt] = heard.usage.cached_tokens

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
        prompt, _ = divmod(index, self._choices)
        told, telling = self._told[index], self._posted.tellings[prompt]
        prompt_ids = self._prompt_ids[prompt]
        last = told.origins[-1] if told.origins else None
        meta = MetaInfo(
            id=self._name(index),
            finish_reason=finish_body(told.finished, told.tokens),
            prompt_tokens=len(prompt_ids),
            completion_tokens=told.tokens,
            cached_tokens=self._cached[prompt],
            cached_tokens_details=CachedTokensDetails(device=self._cached[prompt]),
            weight_version=last.weights if last else self._weight_version,
            weight_versions=weight_spans(told.origins, told.tokens) or UNSET,
            num_retractions=last.retractions if last else 0,
            dp_rank=self._rank_of(last.worker) if last else None,
            e2e_latency=time.monotonic() - self._began if told.finished else UNSET,
            response_sent_to_client_ts=time.time() if told.finished else UNSET,
        )
        reply = GenerateReply(
            text="",
            output_ids=[],
            meta_info=msgspec.structs.replace(meta, **told.meta),
            prompt_token_ids=list(prompt_ids) if telling.prompt_ids else UNSET,
            index=index if self._posted.batch else UNSET,
        )
        return msgspec.structs.replace(reply, **told.reply)

    def _name(self, index: int) -> str:
        prompt, choice = divmod(index, self._choices)
        stream = self._streams[prompt]
        name = str(self._posted.asks[prompt].key or stream.submit.request_id)
        return name if self._choices == 1 else f"{name}_{choice}"
