"""Worker to detokenizer: one message per step."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Attempt, FinishReason, Message, Process, Value
from antiphon.wire.bounds import (
    CHOICES_MAX,
    ChoiceIndex,
    Choices,
    Count,
    Milliseconds,
    Number,
    ShortText,
    Signed,
    TokenCount,
    TokenOffset,
    UnixMs,
)
from antiphon.wire.codec import ID_BYTES, id_count
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import Incarnation, RequestId
from antiphon.wire.sampling import StopStrings
from antiphon.wire.token_outputs import TokenOutputs


class TokenStream(Value):
    """What a detokenizer must know of a request; on an attempt's first row, and on a resend.

    `details_from` is the first offset with token outputs in each choice: 0, or less if those of
    prompt tokens are returned, too. Unset, there are none. `lineage` are the attempts that the
    continued one continues itself, the first one first. `detokenizer_incarnation` is of the one
    process that accepts tokens of this attempt; unset, any of its name does. `owner_sealed`: the
    owner has fixed what is continued, so that a detokenizer which still holds the attempt before
    may have accepted more. `continued` is the number of output tokens of each choice that earlier
    attempts may have shown. The request goes on for `resume_ms` after its owner has died.
    """

    owner: Process
    prompt_tokens: TokenCount
    details_from: TokenOffset | None = None
    cached_tokens: Count = 0
    choices: Choices = 1
    continues: Attempt | None = None
    lineage: tuple[Attempt, ...] = ()
    detokenizer_incarnation: Incarnation | None = None
    owner_sealed: bool = False
    continued: Annotated[tuple[Count, ...], Meta(max_length=CHOICES_MAX)] = ()
    stop: StopStrings = StopStrings()
    deadline_unix_ms: UnixMs
    traceparent: str | None = None
    resume_ms: Milliseconds = 0

    @property
    def earlier(self) -> tuple[Attempt, ...]:
        """The attempts whose outputs this one continues, the first one first."""
        return self.lineage if self.continues is None else (*self.lineage, self.continues)


class TokenRow(Value):
    """New tokens of one choice.

    Attributes:
        attempt: A receiver refuses rows of a lower one.
        offset: Index of the first token in this choice's output; negative for tokens of the prompt,
            which have details and no ids here.
        token_ids: int32, little-endian.
        details: Of exactly the tokens of this row, if any were requested.
        finish_reason: On the last row of a choice, and only there.
        weights: Name of the weights that sampled these tokens; on the first row with such tokens
            that a detokenizer is sent of a choice, and wherever it or `retractions` has changed. A
            row without it, and a token in columns, have those of the row before.
        retractions: How often the choice had lost its pages before; sent with `weights`.
        matched_stop: The token id that ended the choice, if one did. It is not among the ids.
        error: Why the request cannot go on; then `finish_reason` is `error`.
        stream_number: Names this attempt's choice in `TokenColumns` of the same worker process;
            unset if the detokenizer does not read those.
    """

    request_id: RequestId
    choice: ChoiceIndex
    attempt: Attempt
    offset: TokenOffset
    token_ids: bytes = b""
    details: TokenOutputs | None = None
    stream: TokenStream | None = None
    weights: ShortText | None = None
    retractions: Count = 0
    finish_reason: FinishReason | None = None
    matched_stop: Signed | None = None
    error: ErrorReply | None = None
    stream_number: Number | None = None


class TokenColumns(Value):
    """One new token of each of many choices: what a decode step adds to most of them.

    They stand for rows without anything else to report. Where a stream has token outputs, those of
    its token are the id and, if it is among the first ones, its logprob. They are sent only to a
    detokenizer that `reads` them, by its heartbeat. All are little-endian.

    Attributes:
        streams: int64, the `stream_number` of each choice; it was sent in a row before.
        offsets: int32, index of each token in the output of its choice.
        token_ids: int32.
        logprobs: float32, of as many tokens as have one; these come first.
    """

    streams: bytes = b""
    offsets: bytes = b""
    token_ids: bytes = b""
    logprobs: bytes = b""

    def __post_init__(self) -> None:
        size, logprobs = len(self.token_ids), len(self.logprobs)
        if size % ID_BYTES or logprobs % ID_BYTES:
            raise ValueError("a column ends within a number")
        if len(self.streams) != 2 * size or len(self.offsets) != size or logprobs > size:
            raise ValueError("columns of different lengths")

    def __len__(self) -> int:
        return id_count(self.token_ids)


class TokenBatch(Message):
    """Everything one step produced for one detokenizer. The columns come before the rows.

    `seq` is per (worker incarnation, detokenizer). A gap makes the receiver send its table of
    offsets (`ResendTokens`), and the worker answers from its requests' own output lists.
    """

    worker: Process
    seq: Number
    step: Number
    rows: tuple[TokenRow, ...] = ()
    columns: TokenColumns | None = None


class TokenStep(Message):
    """A token more for each row of the message before, as workers up to version 0.4 send it.

    It stands for a batch of the same rows, in that order, each at the offset where it ended there.
    `seq` is of the same numbers: a receiver without the message before has a gap. It is sent only
    to a detokenizer that `reads` it, by its heartbeat.

    Attributes:
        token_ids: One of each row, int32, little-endian.
    """

    worker: Process
    seq: Number
    step: Number
    token_ids: bytes


TokenNews = TokenBatch | TokenStep
"""What a worker sends a detokenizer."""
