"""Actions of the owner: events for the client's stream, and messages for the bus."""

from __future__ import annotations

import msgspec

from antiphon.wire.base import FinishReason, Process, Usage
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import CancelRequest, OpenList, SubmitRequest
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
    """The terminal event of a request: success, or the error that ended it."""

    usage: Usage
    error: EngineError | None = None


StreamEvent = Accepted | TextDelta | Finished | Ended


class Deliver(msgspec.Struct, frozen=True):
    request_id: RequestId
    event: StreamEvent


class Submit(msgspec.Struct, frozen=True):
    """Call the leader; the reply, or a timeout, goes to `Owner.submit_answered`."""

    message: SubmitRequest


class Cancel(msgspec.Struct, frozen=True):
    """Call the leader; the reply, or a timeout, goes to `Owner.cancel_answered`."""

    message: CancelRequest


class Announce(msgspec.Struct, frozen=True):
    """Publish an open list. A lost one is made up for by the next full list."""

    message: OpenList


class FetchText(msgspec.Struct, frozen=True):
    """Fetch missing text from a detokenizer; the outcome goes to `Owner.text_answered`."""

    detokenizer: Process
    message: ResumeText


Action = Deliver | Submit | Cancel | Announce | FetchText
