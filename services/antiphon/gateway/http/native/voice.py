"""How /generate tells its answers: whole, or so far, or what is new."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.chorus import Spoken
from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.native.replies import (
    UNSET,
    GenerateReply,
    MetaInfo,
    finish_body,
    output_ids,
    scores,
    states,
)
from antiphon.gateway.http.sse import DONE, event
from antiphon.gateway.http.voice import Voice
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.wire.codec import id_count, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.chorus import Answer
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.stream import Stream
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError


class GenerateVoice(Voice):
    """POST /generate. An event tells all so far, unless `news` says only what is new."""

    def __init__(
        self, posted: Posted, streams: Sequence[Stream], *, weight_version: str, news: bool
    ) -> None:
        self._posted = posted
        self._streams = streams
        self._weight_version = weight_version
        self._news = news
        self._began = time.monotonic()
        self._choices = posted.asks[0].choices
        self._spoken = [Spoken() for _ in range(len(streams) * self._choices)]
        self._tokens = [0] * len(self._spoken)
        self._cached = [0] * len(streams)

    @property
    def first_ids(self) -> list[int]:
        """The ids of the first answer, once all is told."""
        return output_ids(self._spoken[0].details)

    @property
    def first_text(self) -> str:
        """Its text."""
        return self._spoken[0].text

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object, or a list of them."""
        self._spoken = [spoken for answer in answers for spoken in answer.choices]
        self._cached = [answer.usage.cached_tokens for answer in answers]
        replies = [self._reply(index, spoken) for index, spoken in enumerate(self._spoken)]
        return msgspec.json.encode(replies if self._posted.batch else replies[0])

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """One event for each answer that says something."""
        met: dict[int, Spoken] = {}
        for each in events:
            index = prompt * self._choices + each.choice
            self._hear(prompt, self._spoken[index], each)
            self._hear(prompt, met.setdefault(index, Spoken()), each)
        return b"".join(
            self._event(index, fresh if self._news else self._spoken[index])
            for index, fresh in met.items()
        )

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The mark of the end."""
        return DONE

    def failure(self, error: EngineError) -> bytes:
        """The error, and the mark of the end."""
        return event(msgspec.json.encode(envelope(error))) + DONE

    def _hear(self, prompt: int, spoken: Spoken, heard: Said | Finished) -> None:
        if isinstance(heard, Finished):
            spoken.finished = heard
            return
        spoken.said.append(heard)
        if heard.usage is not None:
            self._cached[prompt] = heard.usage.cached_tokens

    def _event(self, index: int, spoken: Spoken) -> bytes:
        return event(msgspec.json.encode(self._reply(index, spoken)))

    def _reply(self, index: int, spoken: Spoken) -> GenerateReply:
        prompt, _ = divmod(index, self._choices)
        stream, telling = self._streams[prompt], self._posted.tellings[prompt]
        piece = spoken.details
        ids = output_ids(piece)
        self._tokens[index] = self._tokens[index] + len(ids) if self._news else len(ids)
        prompt_ids = unpack_ids(stream.submit.prompt_ids)
        told: dict[str, object] = {}
        if piece is not None and telling.logprobs:
            told |= scores(piece, telling, prompt_ids)
        if piece is not None and telling.hidden:
            told["hidden_states"] = states(piece, telling.hidden)
        meta = MetaInfo(
            id=self._name(index),
            finish_reason=finish_body(spoken.finished, self._tokens[index]),
            prompt_tokens=id_count(stream.submit.prompt_ids),
            completion_tokens=self._tokens[index],
            cached_tokens=self._cached[prompt],
            weight_version=self._weight_version,
            e2e_latency=time.monotonic() - self._began if spoken.finished else UNSET,
        )
        return GenerateReply(
            text=spoken.text,
            output_ids=ids,
            meta_info=msgspec.structs.replace(meta, **told),
            prompt_token_ids=list(prompt_ids) if telling.prompt_ids else UNSET,
            index=index if self._posted.batch else UNSET,
        )

    def _name(self, index: int) -> str:
        prompt, choice = divmod(index, self._choices)
        stream = self._streams[prompt]
        name = str(self._posted.asks[prompt].key or stream.submit.request_id)
        return name if self._choices == 1 else f"{name}_{choice}"
