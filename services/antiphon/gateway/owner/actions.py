"""What the owner wants done: events for the client's stream, and messages for the bus."""

from __future__ import annotations

import msgspec

from antiphon.wire.base import FinishReason, Process, Usage
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import CancelRequest, OpenList, SubmitRequest
from antiphon.wire.text import Origin, ResumeText
from antiphon.wire.token_outputs import TokenOutputsChunk


class Accepted(msgspec.Struct, frozen=True):
    """The leader has queued the request. Not sent when text or the end comes first."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next text of a choice, with nothing missing before it; `text_offset` in UTF-8 bytes.

    `details` are of its next tokens, where the request wanted any; then the text may be empty.
    `origins` are of all its tokens so far.
    """

    choice: int
    text_offset: int
    text: str
    usage: Usage | None = None
    details: TokenOutputsChunk | None = None
    origins: tuple[Origin, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What it counts for while nobody has read it."""
        text = len(self.text) if self.text.isascii() else len(self.text.encode())
        return text if self.details is None else text + self.details.size_bytes


class Finished(msgspec.Struct, frozen=True):
    """A choice is complete."""

    choice: int
    reason: FinishReason
    matched_stop: str | int | None
    text_bytes: int
    origins: tuple[Origin, ...] = ()


class Ended(msgspec.Struct, frozen=True):
    """The one terminal of a request: success, or the error that ended it. Nothing follows."""

    usage: Usage
    error: EngineError | None = None


StreamEvent = Accepted | TextDelta | Finished | Ended


class Deliver(msgspec.Struct, frozen=True):
    """Give an event to the client's stream, in order."""

    request_id: RequestId
    event: StreamEvent


class Submit(msgspec.Struct, frozen=True):
    """Call the leader; its answer, or its silence, goes to `Owner.submit_answered`."""

    message: SubmitRequest


class Cancel(msgspec.Struct, frozen=True):
    """Call the leader; its answer, or its silence, goes to `Owner.cancel_answered`."""

    message: CancelRequest


class Announce(msgspec.Struct, frozen=True):
    """Publish an open list. One that is lost is made good by the next whole one."""

    message: OpenList


class FetchText(msgspec.Struct, frozen=True):
    """Call a detokenizer for what is missing; the outcome goes to `Owner.text_answered`."""

    detokenizer: Process
    message: ResumeText


Action = Deliver | Submit | Cancel | Announce | FetchText
