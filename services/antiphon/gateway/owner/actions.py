"""Actions of the owner: events for the client's stream, and messages for the bus."""

from __future__ import annotations

import msgspec

from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import CancelRequest, OpenList, OpenListState, SubmitRequest
from antiphon.wire.text import Origin, ResumeText
from antiphon.wire.token_outputs import TokenOutputsChunk


class Accepted(msgspec.Struct, frozen=True):
    """The leader has queued the request. Not sent if text or the end arrives first."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next text of a choice, without gaps; `text_offset` is in UTF-8 bytes.

    `details` has the outputs of its next tokens, if requested; then the text may be empty.
    `origins` covers all tokens so far.
    """

    choice: int
    text_offset: int
    text: str
    usage: Usage | None = None
    details: TokenOutputsChunk | None = None
    origins: tuple[Origin, ...] = ()

    @property
    def size_bytes(self) -> int:
        text = len(self.text) if self.text.isascii() else len(self.text.encode())
        return text if self.details is None else text + self.details.size_bytes


class Finished(msgspec.Struct, frozen=True):
    choice: int
    reason: FinishReason
    matched_stop: str | int | None
    text_bytes: int
    origins: tuple[Origin, ...] = ()


class Ended(msgspec.Struct, frozen=True):
    usage: Usage
    error: EngineError | None = None


StreamEvent = Accepted | TextDelta | Finished | Ended


class Deliver(msgspec.Struct, frozen=True):
    request_id: RequestId
    event: StreamEvent


Action = Deliver | SubmitRequest | CancelRequest | OpenList | OpenListState | ResumeText
"""An event for a client's stream, in order, or a message.

A submit or a cancel is a call of the leader: its reply, or a timeout, goes to `submit_answered` or
`cancel_answered` of the owner, and the outcome of fetching missing text from a detokenizer to
`text_answered`. Open lists are published; a process that has missed one requests the whole.
"""
