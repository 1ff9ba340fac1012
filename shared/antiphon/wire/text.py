"""Detokenizer to gateway: one batch of text per step; and how a gateway requests missing text."""

from __future__ import annotations

from antiphon.wire.base import Attempt, FinishReason, Message, Process, Usage, Value
from antiphon.wire.bounds import (
    ChoiceIndex,
    Count,
    Number,
    ShortText,
    Signed,
    TextOffset,
    TokenOffset,
)
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.token_outputs import TokenOutputsChunk


class Origin(Value):
    """The worker and weights that generated the tokens of a choice, from `start` on.

    Attributes:
        start: Index of the first of these tokens in the choice's output.
        weights: Weight version that it had then.
        retractions: How often the choice had been retracted there before.
    """

    start: TokenOffset = 0
    worker: InstanceId
    weights: ShortText
    retractions: Count = 0


class TextRow(Value):
    """More text of one choice.

    Attributes:
        continues: The sealed attempt that this one continues, if any.
        lineage: The sealed attempts that `continues` continues, the first one first.
        text_offset: Start of `text`, in UTF-8 bytes of the choice's text.
        details: Token outputs of roughly the tokens of this text, if the request asked for them.
        finish_reason: The detokenizer's proposal to end the choice; the owner decides.
        usage: The request's token counts as known to this detokenizer. It may lack tokens of other
            choices, which are sent to it again.
        tokens: Output tokens of this choice, as of this row. 0: as `usage` says.
        ids: The last of these tokens, int32, little-endian: those that the gateway was not sent
            before. Rows of one choice join in their ids as they do in their text, and the ids of a
            row determine at least the text up to its end.
        reasoning_tokens: Those of them that are reasoning.
        origins: Origins of all tokens of the choice so far: on its first row, on the first resent
            row, on a row before which they changed, and on the last one.
    """

    request_id: RequestId
    choice: ChoiceIndex
    attempt: Attempt
    continues: Attempt | None = None
    lineage: tuple[Attempt, ...] = ()
    text_offset: TextOffset
    text: str = ""
    details: TokenOutputsChunk | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | Signed | None = None
    usage: Usage | None = None
    tokens: Count = 0
    reasoning_tokens: Count = 0
    origins: tuple[Origin, ...] = ()
    error: ErrorReply | None = None
    ids: bytes = b""


class TextBatch(Message):
    """All text of one step for one gateway. `seq` is per (detokenizer incarnation, gateway)."""

    detokenizer: Process
    gateway: Process
    seq: Number
    rows: tuple[TextRow, ...]


class ChoiceCursor(Value):
    """How much of a choice the gateway has: text in UTF-8 bytes, token outputs up to an offset.

    `token_offset` unset: no token outputs yet. `tokens` is the number of output ids.
    """

    request_id: RequestId
    choice: ChoiceIndex
    text_offset: TextOffset
    token_offset: TokenOffset | None = None
    tokens: Count = 0


class ResumeText(Message):
    """A gateway missed a batch: resend everything of its live requests beyond these cursors.

    Live requests of this gateway that are not listed are sent from the beginning.
    """

    detokenizer: Process
    gateway: Process
    places: tuple[ChoiceCursor, ...] = ()


class TextResumed(Message):
    """The missing rows have been sent on the gateway's text subject."""

    rows: Count
