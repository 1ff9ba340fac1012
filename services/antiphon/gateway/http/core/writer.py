"""The response writer: the part that each family of APIs implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from antiphon.wire.base import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.owner.actions import Finished, TextDelta
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.errors import EngineError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients ignore; it keeps the connection alive."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"


def event(payload: bytes) -> bytes:
    """Format JSON, which has no raw line break, as one event."""
    return b"data: %b\n\n" % payload


def named_event(name: str, payload: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


class ResponseWriter(ABC):
    """Formats one response, complete or as a stream. There is one per response; it may keep state.

    `ResponseHandler` calls `full_response`, or `begin`, then `chunks` for each batch of events, and
    `end` or `failure`; it joins their output into as few writes as possible. `ping` is written
    while there is no output. `persist` is called before the client receives the end; if it raises,
    `failure` is written instead of the end.
    """

    CONTENT_TYPE: ClassVar[str] = CONTENT_TYPE
    """Content type of a stream."""
    RESUMABLE: ClassVar[bool] = False
    """Whether its streams may be resumed: what it has written of a choice depends on the text and
    the token outputs so far, and not on how they were divided; and so does what it writes next."""

    @abstractmethod
    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        """Return the complete response as JSON; the outputs are in the order of the prompts."""

    def begin(self) -> bytes:
        """Return what precedes any text."""
        return b""

    @abstractmethod
    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        pass

    def ping(self) -> bytes:
        return PING

    @abstractmethod
    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return what follows a successful end; the token usage of each prompt."""

    @abstractmethod
    def failure(self, error: EngineError) -> bytes:
        """Return what replaces the end if the request fails."""

    async def persist(self) -> None:  # noqa: B027  # most writers store nothing
        """Store what must be available when the client receives the end."""


def total_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


def line(payload: bytes) -> bytes:
    """Terminate JSON, which has no raw line break, as one line."""
    return payload + b"\n"
