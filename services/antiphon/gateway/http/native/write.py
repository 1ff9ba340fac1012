"""Writer of /generate: complete, cumulative or incremental responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.meta_info import UNSET, GenerateOutputs, MetaInfo, UnsetType
from antiphon.gateway.http.core.writer import DONE, ResponseWriter, event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.native.parse import ParsedGenerateRequest
    from antiphon.gateway.owner.actions import Finished, TextDelta
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or one event of its stream. `index` is the position in a batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class GenerateResponseWriter(ResponseWriter):
    """Writes responses of /generate. Events are cumulative, unless `incremental`."""

    RESUMABLE = True

    def __init__(
        self, parsed: ParsedGenerateRequest, outputs: GenerateOutputs, *, incremental: bool
    ) -> None:
        self._parsed = parsed
        self._incremental = incremental
        self._outputs = outputs
        self._replies = outputs.replies
        self._sent_tokens = [0] * len(self._replies)

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        self._outputs.add_all(answers)
        replies = [self._reply(index) for index in range(len(self._replies))]
        return msgspec.json.encode(replies if self._parsed.batch else replies[0])

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        met: dict[int, None] = {}
        for each in events:
            self._outputs.add(prompt, each)
            met[self._outputs.index(prompt, each.choice)] = None
        return b"".join(self._event(index) for index in met if self._event_due(prompt, index))

    def end(self, usages: Sequence[Usage]) -> bytes:
        return DONE

    def failure(self, error: EngineError) -> bytes:
        return event(msgspec.json.encode(envelope(error))) + DONE

    async def persist(self) -> None:
        await self._outputs.persist()

    def _event_due(self, prompt: int, index: int) -> bool:
        """Whether an output has enough new tokens for an event; its first token always has."""
        reply, before = self._replies[index], self._sent_tokens[index]
        enough = self._parsed.all_reply_options[prompt].interval if before else 1
        return reply.finished is not None or reply.tokens - before >= enough

    def _event(self, index: int) -> bytes:
        data = event(msgspec.json.encode(self._reply(index)))
        self._sent_tokens[index] = self._replies[index].tokens
        if self._incremental:
            self._replies[index].restart()
        return data

    def _reply(self, index: int) -> GenerateReply:
        prompt = index // self._parsed.gen_requests[0].choices
        ids, wanted = self._outputs.prompt_ids[prompt], self._parsed.all_reply_options[prompt]
        reply = GenerateReply(
            text="",
            output_ids=[],
            meta_info=self._outputs.meta_info(index),
            prompt_token_ids=list(ids) if wanted.prompt_ids else UNSET,
            index=index if self._parsed.batch else UNSET,
        )
        return msgspec.structs.replace(reply, **self._replies[index].reply)
