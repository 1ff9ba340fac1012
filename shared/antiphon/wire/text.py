"""Detokenizer to gateway: one batch of text a step; and how a gateway asks for what it lacks."""

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
    """Where the tokens of a choice come from, from one on.

    Attributes:
        start: Index of the first of them in the choice's output.
        worker: Which has drawn them.
        weights: What its weights were called then.
        retractions: How often the choice had lost its pages there before.
    """

    start: TokenOffset = 0
    worker: InstanceId
    weights: ShortText
    retractions: Count = 0


class TextRow(Value):
    """More text of one choice.

    Attributes:
        attempt: The attempt that said it.
        continues: The sealed attempt that this one goes on from, if any.
        text_offset: Where `text` begins, in UTF-8 bytes of the choice's text.
        details: Of more of its tokens, about those whose text this is, if the request wanted any.
        finish_reason: The detokenizer's proposal to end the choice; the owner writes the terminal.
        usage: The request's tokens as far as this detokenizer has seen.
        origins: Of all tokens of the choice so far, where they come from: on its first row, on the
            first one that is sent again, on one before which that has changed, and with the end.
    """

    request_id: RequestId
    choice: ChoiceIndex
    attempt: Attempt
    continues: Attempt | None = None
    text_offset: TextOffset
    text: str = ""
    details: TokenOutputsChunk | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | Signed | None = None
    usage: Usage | None = None
    origins: tuple[Origin, ...] = ()
    error: ErrorReply | None = None


class TextBatch(Message):
    """Everything one step said to one gateway. `seq` is per (detokenizer incarnation, gateway)."""

    detokenizer: Process
    gateway: Process
    seq: Number
    rows: tuple[TextRow, ...]


class ChoiceCursor(Value):
    """How much of a choice the gateway has: text in UTF-8 bytes, details up to a token offset.

    `token_offset` unset stands for the beginning of the details.
    """

    request_id: RequestId
    choice: ChoiceIndex
    text_offset: TextOffset
    token_offset: TokenOffset | None = None


class ResumeText(Message):
    """A gateway missed a batch: send everything of its live requests beyond these places.

    Live requests of this gateway that the table does not list are sent from the beginning.
    """

    detokenizer: Process
    gateway: Process
    places: tuple[ChoiceCursor, ...] = ()


class TextResumed(Message):
    """What was missing is on its way on the gateway's text subject."""

    rows: Count
