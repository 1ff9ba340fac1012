"""How a family of APIs tells an answer: the one thing that each writes for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from antiphon.gateway.http.core.sse import CONTENT_TYPE, PING
from antiphon.wire.base import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.owner.actions import Finished, TextDelta
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.errors import EngineError


class ResponseWriter(ABC):
    """Writes one client's answer, whole or in pieces. One an answer: it may remember what it said.

    `ResponseHandler` calls `whole`, or `begin`, then `chunks` for each batch of events, and `end`
    or `failure`; it joins what they return into as few writes as there can be. While there is
    nothing to write for long, `ping` is. Before the client hears the end, `keep` is called; if that
    raises, `failure` is told in place of the end.
    """

    CONTENT_TYPE: ClassVar[str] = CONTENT_TYPE
    """Of a stream."""

    @abstractmethod
    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        """All of it, as JSON: the answers to the prompts in their order."""

    @abstractmethod
    def begin(self) -> bytes:
        """What comes before any text."""

    @abstractmethod
    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """More of the answer to one prompt."""

    def ping(self) -> bytes:
        """What shows that the stream lives while the model has written nothing new."""
        return PING

    @abstractmethod
    def end(self, usages: Sequence[Usage]) -> bytes:
        """What comes after all has been said well; the tokens of each prompt."""

    @abstractmethod
    def failure(self, error: EngineError) -> bytes:
        """What comes in place of the end when the answer breaks off."""

    async def persist(self) -> None:  # noqa: B027  # most answers are told, and that is all
        """Put by what has to be there when the client hears the end.

        Raises:
            EngineError: It could not be put by.
        """


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The tokens of several prompts together."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
