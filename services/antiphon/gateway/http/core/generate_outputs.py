"""Collected outputs of a request in the format of /generate, which completions may return too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.meta_info import (
    FULL,
    UNSET,
    CachedTokensDetails,
    MetaInfo,
    finish_body,
    output_ids,
    scores,
    weight_spans,
)
from antiphon.gateway.owner.actions import Finished
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.gateway.http.core.meta_info import GenerateResponseOptions
    from antiphon.gateway.owner.actions import TextDelta
    from antiphon.gateway.stream.stream import ChoiceEvent, CollectedResponse, RequestStream
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.text import Origin
    from antiphon.wire.token_outputs import TokenOutputsChunk

    RankOf = Callable[[InstanceId], int | None]
    PersistReply = Callable[[RequestStream, "GenerateReplyWriter"], Awaitable[None]]


class GenerateOutputs:
    """The outputs of every prompt of a request, indexed over all of them."""

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
        """Start without outputs; `firsts` are texts of the prompts' first tokens, if requested."""
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
        return prompt * self._choices + choice

    def add(self, prompt: int, event: ChoiceEvent) -> None:
        reply = self.replies[self.index(prompt, event.choice)]
        if isinstance(event, Finished):
            reply.end(event)
            return
        reply.add(event)
        if event.usage is not None:
            self._cached[prompt] = event.usage.cached_tokens

    def add_all(self, answers: Sequence[CollectedResponse]) -> None:
        for prompt, answer in enumerate(answers):
            for collected in answer.choices:
                for delta in collected.deltas:
                    self.replies[self.index(prompt, delta.choice)].add_token_texts(delta)
                for event in (*collected.deltas, collected.end):
                    self.add(prompt, event)
            self._cached[prompt] = answer.usage.cached_tokens

    async def persist(self) -> None:
        if self._persist is not None:
            await self._persist(self._streams[0], self.replies[0])

    def meta_info(self, index: int) -> MetaInfo:
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


_SCORED = "output_token_logprobs"


class JsonList:
    """A JSON list that grows at its end."""

    def __init__(self) -> None:
        self.body = bytearray()
        """The items, without the brackets."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, items: Sequence[object]) -> None:
        if items:
            if self.body:
                self.body += b","
            self.body += msgspec.json.encode(items)[1:-1]
            self._count += len(items)

    @property
    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"[%b]" % self.body)


class GenerateReplyWriter:
    """Fields of a reply, each as JSON that grows with the output.

    A cumulative event is as long as the output so far, but each token is encoded once.
    """

    def __init__(
        self,
        options: GenerateResponseOptions,
        prompt_ids: Sequence[int],
        first_text: str | None = None,
    ) -> None:
        self.finished: Finished | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.origins: tuple[Origin, ...] = ()
        self._options = options
        self._prompt_ids = prompt_ids
        self._known: dict[int, str] = {}
        self._first_text = first_text
        self._begun = False  # token outputs were received
        self.restart()

    def restart(self) -> None:
        """Return only what is added from here on."""
        self._text = bytearray()
        self._ids = JsonList()
        self._columns: dict[str, JsonList] = {}
        self._states: tuple[JsonList, JsonList] | None = None  # of the prompt and of the output

    def add_token_texts(self, delta: TextDelta) -> None:
        """Add token texts, which other fields may need too."""
        if delta.details is not None:
            piece = delta.details
            self._known |= {token: piece.text_of(token) for token in piece.texts}

    def add(self, delta: TextDelta) -> None:
        self.add_token_texts(delta)
        self.origins = delta.origins or self.origins
        self.texts.append(delta.text)
        self._text += msgspec.json.encode(delta.text)[1:-1]
        piece = delta.details
        if piece is None:
            return
        begins, self._begun = not self._begun, True
        ids = output_ids(piece)
        self.ids += ids
        self._ids.add(ids)
        if self._options.logprobs:
            columns = scores(
                piece,
                self._options,
                self._prompt_ids,
                texts=self._known,
                first_text=self._first_text,
                begins=begins,
            )
            for name, items in columns.items():
                self._columns.setdefault(name, JsonList()).add(items)
        if self._options.hidden:
            self._add_hidden_states(piece, together=self._options.hidden == FULL)

    def end(self, finished: Finished) -> None:
        self.finished = finished
        self.origins = finished.origins or self.origins

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def reply(self) -> dict[str, object]:
        return {
            "text": msgspec.Raw(b'"%b"' % self._text),
            "output_ids": self._ids.raw,
        }

    @property
    def meta(self) -> dict[str, object]:
        fields: dict[str, object] = {name: column.raw for name, column in self._columns.items()}
        if _SCORED in self._columns:
            fields["output_token_logprobs_length"] = len(self._columns[_SCORED])
        if self._states is not None:
            read, drawn = self._states
            parts = [*([bytes(read.raw)] if read else ()), *([bytes(drawn.body)] if drawn else ())]
            fields["hidden_states"] = msgspec.Raw(b"[%b]" % b",".join(parts))
        return fields

    def _add_hidden_states(self, piece: TokenOutputsChunk, *, together: bool) -> None:
        """Add hidden states: those of the prompt as one list if `together`, else one per token.

        The first output token follows the last prompt token.
        """
        read, drawn = self._states = self._states or (JsonList(), JsonList())
        for offset, token in enumerate(piece.details.iter_tokens(), piece.offset):
            column = read if together and offset <= 0 else drawn
            column.add([list(token.hidden)])
