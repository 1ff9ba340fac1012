"""Collected outputs of a request in the format of /generate, which completions may return too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.generate_reply import GenerateReplyWriter
from antiphon.gateway.http.core.token_origins import CachedTokensDetails, weight_spans
from antiphon.gateway.http.native.replies import UNSET, MetaInfo, finish_body
from antiphon.gateway.owner.actions import Finished
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.gateway.http.native.parse import GenerateResponseOptions
    from antiphon.gateway.stream.group import ChoiceEvent, CollectedResponse
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.ids import InstanceId

    RankOf = Callable[[InstanceId], int | None]
    PersistReply = Callable[[RequestStream, GenerateReplyWriter], Awaitable[None]]


class GenerateOutputs:
    """The outputs of every prompt of a request, indexed over all of them.

    Attributes:
        prompt_ids: Token ids of each prompt.
        replies: Reply writer of each output.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        options: Sequence[GenerateResponseOptions],
        *,
        firsts: Sequence[str | None],
        rank_of: RankOf,
        weight_version: str,
        persist: PersistReply | None = None,
    ) -> None:
        """Start without outputs.

        Args:
            streams: One for each prompt.
            options: Which fields to return.
            firsts: Text of each prompt's first token, if requested.
            rank_of: Returns the index of a worker in /v1/loads.
            weight_version: Weight version to report if no worker has reported one.
            persist: Stores the first output, if the request belongs to a session.
        """
        self._streams = streams
        self._rank_of = rank_of
        self._weight_version = weight_version
        self._persist = persist
        self._began = time.monotonic()
        self._choices = streams[0].submit.choices
        self.prompt_ids = [unpack_ids(stream.submit.prompt_ids) for stream in streams]
        self.replies = [
            GenerateReplyWriter(reply_options, prompt_ids, first)
            for reply_options, prompt_ids, first in zip(
                options, self.prompt_ids, firsts, strict=True
            )
            for _ in range(self._choices)
        ]
        self._cached = [0] * len(streams)

    def index(self, prompt: int, choice: int) -> int:
        """Index of an output."""
        return prompt * self._choices + choice

    def add(self, prompt: int, event: ChoiceEvent) -> None:
        """Add events of a prompt."""
        reply = self.replies[self.index(prompt, event.choice)]
        if isinstance(event, Finished):
            reply.end(event)
            return
        reply.add(event)
        if event.usage is not None:
            self._cached[prompt] = event.usage.cached_tokens

    def add_all(self, answers: Sequence[CollectedResponse]) -> None:
        """Add the outputs of a non-streaming response."""
        for prompt, answer in enumerate(answers):
            for collected in answer.choices:
                for delta in collected.deltas:
                    self.replies[self.index(prompt, delta.choice)].add_token_texts(delta)
                for event in (*collected.deltas, collected.end):
                    self.add(prompt, event)
            self._cached[prompt] = answer.usage.cached_tokens

    async def persist(self) -> None:
        """Store the output for the session.

        Raises:
            EngineError: It could not be stored.
        """
        if self._persist is not None:
            await self._persist(self._streams[0], self.replies[0])

    def meta_info(self, index: int) -> MetaInfo:
        """Return the metadata of an output."""
        prompt, _ = divmod(index, self._choices)
        reply = self.replies[index]
        last = reply.origins[-1] if reply.origins else None
        meta = MetaInfo(
            id=self._name(index),
            finish_reason=finish_body(reply.finished, reply.tokens),
            prompt_tokens=len(self.prompt_ids[prompt]),
            completion_tokens=reply.tokens,
            cached_tokens=self._cached[prompt],
            cached_tokens_details=CachedTokensDetails(device=self._cached[prompt]),
            weight_version=last.weights if last else self._weight_version,
            weight_versions=weight_spans(reply.origins, reply.tokens) or UNSET,
            num_retractions=last.retractions if last else 0,
            dp_rank=self._rank_of(last.worker) if last else None,
            e2e_latency=time.monotonic() - self._began if reply.finished else UNSET,
            response_sent_to_client_ts=time.time() if reply.finished else UNSET,
        )
        return msgspec.structs.replace(meta, **reply.meta)

    def _name(self, index: int) -> str:
        prompt, choice = divmod(index, self._choices)
        stream = self._streams[prompt]
        name = str(stream.submit.request_id if stream.name is None else stream.name[1])
        return name if self._choices == 1 else f"{name}_{choice}"
