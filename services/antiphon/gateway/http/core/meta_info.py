"""Outputs in the format of /generate, which other APIs may return too, such as `meta_info`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.gateway.http.core.logprobs import LOWEST
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.wire.base import FinishReason, Role
from antiphon.wire.codec import unpack_ids
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from antiphon.gateway.stream.stream import ChoiceEvent, CollectedResponse, RequestStream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.text import Origin
    from antiphon.wire.token_outputs import TokenOutput, TokenOutputsChunk

    RankOf = Callable[[InstanceId], int | None]
    PersistReply = Callable[[RequestStream, "GenerateReplyWriter"], Awaitable[None]]

FULL = "full"
"""Return hidden states of the prompt too."""

Scored = tuple[float | None, int, str | None]
"""Logprob, token id and, if requested, token text."""
States = list[list[float | list[float]]]


class GenerateResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Response options of one prompt.

    `start` is the first prompt token with logprobs, -1 for output tokens only; `hidden` is `full`,
    `last` or nothing; `interval` is the number of tokens per stream event, after the first.
    """

    logprobs: bool = False
    start: int = -1
    top: int = 0
    named_ids: tuple[int, ...] = ()
    texts: bool = False
    hidden: str = ""
    prompt_ids: bool = False
    interval: int = 1

    @property
    def needs_first_text(self) -> bool:
        """Whether to return the text of the first prompt token, which has no token outputs."""
        return self.logprobs and self.texts and self.start == 0

    @property
    def token_outputs(self) -> TokenOutputParams:
        """Token outputs to request from the engine; ids always are."""
        full = self.hidden == FULL
        return TokenOutputParams(
            ids=True,
            logprobs=self.logprobs,
            top=self.top,
            named_ids=self.named_ids,
            hidden=bool(self.hidden),
            prompt_start=0 if full else self.start,
        )


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of cached prompt tokens by cache tier. There is one tier."""

    device: int
    host: int = 0


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens sampled by one weight version: from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why generation ended.

    An abort requested by a client has no status code. A failed request returns an error instead.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    status_code: int | UnsetType | None = UNSET
    err_type: str | UnsetType | None = UNSET


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a response.

    `reasoning_tokens` is 0, as in SGLang for a request without `require_reasoning`.
    """

    id: str
    finish_reason: FinishBody | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    weight_version: str
    """Weight version that sampled the last token."""
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    """Spans of output tokens by weight version, if it changed during generation."""
    num_retractions: int
    """Number of times the request was retracted from a running batch and resumed."""
    dp_rank: int | None
    """Index of the last worker in /v1/loads, if it is still listed."""
    e2e_latency: float | UnsetType = UNSET
    """Seconds from receiving the request to its end. Set in the last event."""
    response_sent_to_client_ts: float | UnsetType = UNSET
    """Unix time at which the last event was sent."""
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    hidden_states: States | UnsetType = UNSET


def weight_spans(origins: Sequence[Origin], tokens: int) -> list[WeightSpan]:
    """Spans of output tokens by weight version. Empty unless more than one version was used.

    A stop sequence may have removed all tokens of the last version.
    """
    spans: list[WeightSpan] = []
    for number, origin in enumerate(origins):
        after = origins[number + 1].start if number + 1 < len(origins) else tokens
        end = min(after, tokens)
        if end <= origin.start:
            continue
        if spans and spans[-1].version == origin.weights:
            spans[-1] = msgspec.structs.replace(spans[-1], end=end)
        else:
            spans.append(WeightSpan(version=origin.weights, start=origin.start, end=end))
    return spans if len(spans) > 1 else []


def weight_version(runtime: Runtime) -> str:
    beats = (peer.heartbeat for peer in runtime.peers.with_role(Role.WORKER))
    named = (beat.worker.weight_version for beat in beats if beat.worker is not None)
    return next((name for name in named if name), "default")


def finish_body(finished: Finished | None, tokens: int) -> FinishBody | None:
    """Convert a finish reason; `tokens` is the completion length."""
    if finished is None:
        return None
    match finished.reason:
        case FinishReason.LENGTH:
            return FinishBody(type="length", length=tokens)
        case FinishReason.ABORT:
            return FinishBody(type="abort", message="Aborted", status_code=None, err_type=None)
        case _:
            return FinishBody(type="stop", matched=finished.matched_stop)


def output_ids(piece: TokenOutputsChunk | None) -> list[int]:
    """Output token ids of a piece. Prompt tokens have offsets below 0."""
    if piece is None:
        return []
    ids = unpack_ids(piece.details.token_ids)
    return [token for token in ids[max(0, -piece.offset) :] if token >= 0]


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
            for name, items in self._scores(piece, begins=begins).items():
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
        return {"text": msgspec.Raw(b'"%b"' % self._text), "output_ids": self._ids.raw}

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

    def _scores(self, piece: TokenOutputsChunk, *, begins: bool) -> dict[str, list[object]]:
        """Return the logprob fields of `MetaInfo` for a piece; it may include prompt tokens."""
        start = self._options.start
        entries = list(enumerate(piece.details.iter_tokens(), piece.offset))
        columns = self._score_columns("output", (token for at, token in entries if at >= 0))
        if start < 0 or (piece.offset >= 0 and not begins):
            return columns
        first = start - len(self._prompt_ids)
        read = self._score_columns("input", (token for at, token in entries if first <= at < 0))
        if begins and start == 0:  # the first prompt token has no logprob
            for name, column in read.items():
                unscored = (None, self._prompt_ids[0], self._first_text)
                column.insert(0, unscored if name == "input_token_logprobs" else None)
        return {**columns, **read}

    def _score_columns(self, side: str, tokens: Iterable[TokenOutput]) -> dict[str, list[object]]:
        named_ids = self._options.named_ids
        scored: list[object] = []
        tops: list[object] = []
        named: list[object] = []
        for token in tokens:
            if token.token_id >= 0:
                scored.append(self._scored(token.logprob, token.token_id))
            tops.append([self._scored(logprob, each) for each, logprob in token.top if each >= 0])
            pairs = zip(token.named, named_ids, strict=False)
            named.append([self._scored(logprob, each) for logprob, each in pairs])
        columns = {f"{side}_token_logprobs": scored}
        if self._options.top:
            columns[f"{side}_top_logprobs"] = tops
        if named_ids:
            columns[f"{side}_token_ids_logprobs"] = named
        return columns

    def _scored(self, logprob: float | None, token_id: int) -> Scored:
        value = None if logprob is None else max(logprob, LOWEST)
        return value, token_id, self._known.get(token_id)

    def _add_hidden_states(self, piece: TokenOutputsChunk, *, together: bool) -> None:
        """Add hidden states: those of the prompt as one list if `together`, else one per token.

        The first output token follows the last prompt token.
        """
        read, drawn = self._states = self._states or (JsonList(), JsonList())
        for offset, token in enumerate(piece.details.iter_tokens(), piece.offset):
            column = read if together and offset <= 0 else drawn
            column.add([list(token.hidden)])
