"""Shared parts of the writers of chat and text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.meta_info import CachedTokensDetails
from antiphon.gateway.http.core.sse import DONE, event
from antiphon.gateway.http.core.writer import ResponseWriter, total_usage
from antiphon.gateway.http.openai.replies import (
    UNSET,
    Extension,
    UnsetType,
    UsageBody,
    usage_body,
)
from antiphon.wire.base import Usage
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.generate_outputs import GenerateOutputs
    from antiphon.gateway.http.core.meta_info import MetaInfo
    from antiphon.gateway.http.openai.response_options import OpenAiResponseOptions
    from antiphon.gateway.owner.actions import Finished, TextDelta
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.errors import EngineError
    from antiphon.wire.token_outputs import TokenOutputsChunk


class CompletionHeader(msgspec.Struct, frozen=True):
    """Fields of every response object.

    `weight_version` is reported if no worker has reported one.
    """

    id: str
    created: int
    model: str
    weight_version: str


class OpenAiResponseWriter(ResponseWriter):
    """Base writer. Choices are indexed over all prompts."""

    def __init__(
        self,
        header: CompletionHeader,
        streams: Sequence[RequestStream],
        options: OpenAiResponseOptions,
        *,
        cached: bool,
        record: GenerateOutputs | None = None,
    ) -> None:
        """Start a response.

        Args:
            header: Fields of every object.
            streams: One for each prompt.
            options: Optional fields.
            cached: Whether usage includes cached tokens.
            record: Collects outputs for `meta_info` or for a session, if needed.
        """
        self._header = header
        self._options = options
        self._bare = options.bare
        self._cached = cached
        self._record = record
        self._streams = streams
        self._sent_ids: dict[int, list[int]] = {}
        self._hidden: dict[int, list[list[float]]] = {}
        self._usages = [
            Usage(prompt_tokens=len(unpack_ids(stream.submit.prompt_ids)))
            if options.usage_always
            else Usage()
            for stream in streams
        ]
        self._prompt_ids = [
            list(unpack_ids(stream.submit.prompt_ids)) if options.prompt_ids else UNSET
            for stream in streams
        ]
        self._unsent_prompts = set(range(options.choices * len(streams)))

    def failure(self, error: EngineError) -> bytes:
        """Return the error and the end marker."""
        return event(msgspec.json.encode(envelope(error))) + DONE

    async def persist(self) -> None:
        """Store the output for the session."""
        if self._record is not None:
            await self._record.persist()

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._options.choices + choice

    def _usage(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(total_usage(usages), cached=self._cached)

    def _extension(self, usages: Sequence[Usage]) -> Extension | UnsetType:
        """Build the extension object after all choices; unset if it is empty."""
        reply_options = self._options
        if not (
            reply_options.cached_details or reply_options.input_ids or reply_options.output_ids
        ):
            return UNSET
        device = total_usage(usages).cached_tokens
        prompts = [list(unpack_ids(stream.submit.prompt_ids)) for stream in self._streams]
        answers = [ids for _, ids in sorted(self._sent_ids.items())]
        return Extension(
            cached_tokens_details=CachedTokensDetails(device=device)
            if reply_options.cached_details
            else UNSET,
            input_ids=_flat(prompts) if reply_options.input_ids else UNSET,
            output_ids=_flat(answers) if reply_options.output_ids else UNSET,
        )

    def _record_events(self, prompt: int, events: Sequence[TextDelta | Finished]) -> None:
        """Collect events, if they are needed at the end."""
        if self._record is not None:
            for each in events:
                self._record.add(prompt, each)

    def _meta_info(self, index: int, prompt: int, finished: Finished) -> MetaInfo | UnsetType:
        """Return the `meta_info` of a finished choice; ids are returned separately at the end."""
        if self._record is None:
            return UNSET
        number = self._record.index(prompt, finished.choice)
        self._sent_ids[index] = self._record.replies[number].ids
        return self._record.meta_info(number) if self._options.meta_info else UNSET

    def _usage_so_far(self, prompt: int, delta: TextDelta | None) -> UsageBody | None:
        if not self._options.usage_always:
            return None
        if delta is not None and delta.usage is not None:
            self._usages[prompt] = delta.usage
        return self._usage(self._usages)

    def _prompt_ids_once(self, prompt: int, choice: int) -> list[int] | UnsetType:
        """Return the prompt token ids with the first chunk of each choice."""
        index = self._index(prompt, choice)
        if index not in self._unsent_prompts:
            return UNSET
        self._unsent_prompts.discard(index)
        return self._prompt_ids[prompt]

    def _collect_hidden_states(self, index: int, piece: TokenOutputsChunk | None) -> None:
        """Collect hidden states of a choice, which a stream sends once at its end."""
        states = self._hidden_states(piece)
        if states is not UNSET:
            self._hidden.setdefault(index, []).extend(states)

    def _take_hidden_states(self, index: int) -> list[list[float]] | UnsetType:
        return self._hidden.pop(index, []) if self._options.hidden else UNSET

    def _hidden_states(self, piece: TokenOutputsChunk | None) -> list[list[float]] | UnsetType:
        if not self._options.hidden or piece is None:
            return UNSET
        return [list(token.hidden) for token in piece.details.iter_tokens()]

    def _ids(self, piece: TokenOutputsChunk | None) -> list[int] | UnsetType:
        """Return output token ids; prompt tokens have offsets below 0."""
        if not self._options.ids or piece is None:
            return UNSET
        ids = unpack_ids(piece.details.token_ids)
        return [token for token in ids[max(0, -piece.offset) :] if token >= 0]


def _flat(rows: list[list[int]]) -> list[int | list[int]]:
    """Return lists of ids, or the single list itself."""
    return [*rows[0]] if len(rows) == 1 else [*rows]
