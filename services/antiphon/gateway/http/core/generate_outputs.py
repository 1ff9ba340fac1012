"""What was heard of the answers to a request, as /generate tells it and completions may, too."""

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
    """The answers to every prompt of a request, numbered through all of them.

    Attributes:
        prompt_ids: Of each prompt.
        told: Of each answer.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        options: Sequence[GenerateResponseOptions],
        *,
        firsts: Sequence[str | None],
        rank_of: RankOf,
        weight_version: str,
        keep: PersistReply | None = None,
    ) -> None:
        """Nothing was heard yet.

        Args:
            streams: One for each prompt.
            options: What is told of its answers.
            firsts: The text of its first token, where that is told.
            rank_of: Tells the place of a worker among them.
            weight_version: What the weights are called where no worker has said which answered.
            keep: Puts by the first answer, where it stands in a session.
        """
        self._streams = streams
        self._rank_of = rank_of
        self._weight_version = weight_version
        self._keep = keep
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
        """The number of an answer."""
        return prompt * self._choices + choice

    def add(self, prompt: int, heard: ChoiceEvent) -> None:
        """Note more of an answer to a prompt."""
        told = self.replies[self.index(prompt, heard.choice)]
        if isinstance(heard, Finished):
            told.end(heard)
            return
        told.add(heard)
        if heard.usage is not None:
            self._cached[prompt] = heard.usage.cached_tokens

    def add_all(self, answers: Sequence[CollectedResponse]) -> None:
        """Note answers that are told in one piece."""
        for prompt, answer in enumerate(answers):
            for collected in answer.choices:
                for said in collected.said:
                    self.replies[self.index(prompt, said.choice)].learn_texts(said)
                for heard in (*collected.said, collected.end):
                    self.add(prompt, heard)
            self._cached[prompt] = answer.usage.cached_tokens

    async def persist(self) -> None:
        """Put by what a session goes on from.

        Raises:
            EngineError: It could not be put by.
        """
        if self._keep is not None:
            await self._keep(self._streams[0], self.replies[0])

    def meta_info(self, index: int) -> MetaInfo:
        """What is known of an answer beside what it says."""
        prompt, _ = divmod(index, self._choices)
        told = self.replies[index]
        last = told.origins[-1] if told.origins else None
        meta = MetaInfo(
            id=self._name(index),
            finish_reason=finish_body(told.finished, told.tokens),
            prompt_tokens=len(self.prompt_ids[prompt]),
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
        return msgspec.structs.replace(meta, **told.meta)

    def _name(self, index: int) -> str:
        prompt, choice = divmod(index, self._choices)
        stream = self._streams[prompt]
        name = str(stream.submit.request_id if stream.name is None else stream.name[1])
        return name if self._choices == 1 else f"{name}_{choice}"
