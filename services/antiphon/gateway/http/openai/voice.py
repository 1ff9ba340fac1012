"""How OpenAI clients hear an answer: what chats and text completions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.openai.replies import (
    UNSET,
    Extension,
    UnsetType,
    UsageBody,
    extension,
    usage_body,
)
from antiphon.gateway.http.sse import DONE, event
from antiphon.gateway.http.voice import Voice, total
from antiphon.wire.base import Usage
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.openai.reading import Telling
    from antiphon.gateway.owner.actions import Said
    from antiphon.gateway.stream import Stream
    from antiphon.wire.details import DetailPiece
    from antiphon.wire.errors import EngineError


class Header(msgspec.Struct, frozen=True):
    """What stands on every object of an answer.

    `weight_version` names the weights where no worker has said which ones answered.
    """

    id: str
    created: int
    model: str
    weight_version: str


class OpenAiVoice(Voice):
    """What chats and text completions have in common. Choices are numbered through all prompts."""

    def __init__(
        self, header: Header, streams: Sequence[Stream], telling: Telling, *, cached: bool
    ) -> None:
        self._header = header
        self._telling = telling
        self._cached = cached
        self._usages = [
            Usage(prompt_tokens=len(unpack_ids(stream.submit.prompt_ids)))
            if telling.usage_always
            else Usage()
            for stream in streams
        ]
        self._prompt_ids = [
            list(unpack_ids(stream.submit.prompt_ids)) if telling.prompt_ids else UNSET
            for stream in streams
        ]
        self._unsaid = set(range(telling.choices * len(streams)))

    def failure(self, error: EngineError) -> bytes:
        """The error, and the mark of the end."""
        return event(msgspec.json.encode(envelope(error))) + DONE

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._telling.choices + choice

    def _usage(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(total(usages), cached=self._cached)

    def _extension(self, usages: Sequence[Usage]) -> Extension | UnsetType:
        return extension(total(usages), cached=self._telling.cached_details)

    def _usage_so_far(self, prompt: int, said: Said | None) -> UsageBody | None:
        if not self._telling.usage_always:
            return None
        if said is not None and said.usage is not None:
            self._usages[prompt] = said.usage
        return self._usage(self._usages)

    def _prompt_once(self, prompt: int, choice: int) -> list[int] | UnsetType:
        """The ids of a prompt, on the first chunk of each of its choices."""
        index = self._index(prompt, choice)
        if index not in self._unsaid:
            return UNSET
        self._unsaid.discard(index)
        return self._prompt_ids[prompt]

    def _states(self, piece: DetailPiece | None) -> list[list[float]] | UnsetType:
        if not self._telling.hidden or piece is None:
            return UNSET
        return [list(token.hidden) for token in piece.details.each()]

    def _ids(self, piece: DetailPiece | None) -> list[int] | UnsetType:
        """Those of the answer; tokens of the prompt lie before."""
        if not self._telling.ids or piece is None:
            return UNSET
        ids = unpack_ids(piece.details.token_ids)
        return [token for token in ids[max(0, -piece.offset) :] if token >= 0]
