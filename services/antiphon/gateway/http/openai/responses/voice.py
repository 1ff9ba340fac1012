"""How clients hear a response: whole, or by the events of its stream."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.openai.logprobs import chat_logprobs
from antiphon.gateway.http.openai.responses.events import (
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    OfResponse,
    Queued,
    written,
)
from antiphon.gateway.http.openai.responses.replies import (
    FailedBecause,
    IncompleteBecause,
    response_usage,
)
from antiphon.gateway.http.openai.responses.teller import Teller
from antiphon.gateway.http.openai.speech import Speech
from antiphon.gateway.http.voice import Voice, total
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.gateway.parsing.events import Content
from antiphon.wire.base import FinishReason
from antiphon.wire.details import join_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from antiphon.gateway.chorus import Answer
    from antiphon.gateway.http.openai.logprobs import TokenLogprob
    from antiphon.gateway.http.openai.responses.events import ResponseEvent
    from antiphon.gateway.http.openai.responses.items import Status
    from antiphon.gateway.http.openai.responses.replies import ResponseReply, State
    from antiphon.gateway.http.openai.responses.tools import ToolTarget
    from antiphon.gateway.http.openai.speech import Hearing
    from antiphon.wire.base import Usage
    from antiphon.wire.details import DetailPiece
    from antiphon.wire.errors import EngineError

Keep = Callable[["ResponseReply"], Awaitable[None]]

_ITEM_ENDS: dict[FinishReason, Status] = {FinishReason.STOP: "completed"}
_ENDS: dict[FinishReason, State] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_FAILED = "server_error"
"""What OpenAI's clients know of all that goes wrong after a response has begun."""


class ResponseVoice(Voice):
    """One response, from its beginning to its end.

    Attributes:
        response: As it stands.
    """

    def __init__(
        self,
        begun: ResponseReply,
        hearing: Hearing,
        *,
        inside: bool,
        logprobs: bool,
        now: Callable[[], int],
        keep: Keep | None = None,
        targets: Mapping[str, ToolTarget],
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """Nothing was said yet.

        Args:
            begun: The response with no output.
            hearing: How the answer is taken apart.
            inside: Whether it begins as thinking.
            logprobs: Whether log-probabilities are told.
            now: Seconds since 1970.
            keep: Keeps the response as it stands; None: it is not kept.
            targets: What the tools are to the client, by the names that the model sees.
            seal: Seals reasoning that the client carries; None: it is not asked for.
        """
        self.response = begun
        self._now = now
        self._keep = keep
        self._end_number: int | None = None
        self._logprobs = logprobs
        self._unsaid: list[DetailPiece] = []
        self._reason = FinishReason.STOP
        self._speech = Speech(hearing, inside=inside)
        self._numbers = itertools.count()
        self._teller = Teller(self._number, targets, seal)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The response, ended."""
        (answer,) = answers
        (spoken,) = answer.choices
        for said in (*spoken.said, spoken.end):
            self._hear(said)
        self._settle([answer.usage])
        return msgspec.json.encode(self.response)

    def begin(self) -> bytes:
        """It exists, and is being made, or will be."""
        then = Queued if self.response.status == "queued" else InProgress
        return self._state(Created) + self._state(then)

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """Events of its items."""
        begins = b""
        if self.response.status == "queued":
            self.response = msgspec.structs.replace(self.response, status="in_progress")
            begins = self._state(InProgress)
        return begins + b"".join(written(told) for event in events for told in self._hear(event))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The response as it is for ever."""
        self._settle(usages)
        return self._close(Completed if self.response.status == "completed" else Incomplete)

    async def keep(self) -> None:
        """Keep the response as it stands."""
        if self._keep is not None:
            await self._keep(self.response)

    def failure(self, error: EngineError) -> bytes:
        """The response with the error that ended it, and what was said before."""
        told = b"".join(map(written, self._teller.end("incomplete")))
        said = msgspec.structs.replace(self.response, output=list(self._teller.items))
        self.response = failed(said, envelope(error).error.message)
        return told + self._close(Failed)

    def _hear(self, said: Said | Finished) -> list[ResponseEvent]:
        if isinstance(said, Said):
            return list(self._told(said))
        self._reason = said.reason
        rest = [told for event in self._speech.end() for told in self._teller.hear(event)]
        return [*rest, *self._teller.end(_ITEM_ENDS.get(said.reason, "incomplete"))]

    def _told(self, said: Said) -> Iterator[ResponseEvent]:
        """Log-probabilities wait for the next content: text may be held back before it is one."""
        events = self._speech.feed(said.text)
        if said.details is not None and self._logprobs:
            self._unsaid.append(said.details)
        for event in events:
            if isinstance(event, Content):
                yield from self._teller.hear(event, self._details())
            else:
                yield from self._teller.hear(event)
        if events:
            self._unsaid.clear()  # they were of thinking, or of a call

    def _details(self) -> list[TokenLogprob]:
        piece = join_pieces(self._unsaid)
        self._unsaid.clear()
        told = chat_logprobs(piece)
        return [] if told is None else told.content

    def _settle(self, usages: Iterable[Usage]) -> None:
        """Write down how it has ended. Twice is as good as once."""
        status = _ENDS.get(self._reason, "failed")
        cut = IncompleteBecause("max_output_tokens") if status == "incomplete" else None
        ended_at = self.response.completed_at or self._now()
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=ended_at if status == "completed" else None,
            incomplete_details=cut,
            output=list(self._teller.items),
            usage=response_usage(total(list(usages))),
        )

    def _state(self, kind: type[OfResponse]) -> bytes:
        return written(kind(sequence_number=self._number(), response=self.response))

    def _close(self, kind: type[OfResponse]) -> bytes:
        """The last event. One that was not sent, as its response was not kept, is told anew."""
        if self._end_number is None:
            self._end_number = self._number()
        return written(kind(sequence_number=self._end_number, response=self.response))

    def _number(self) -> int:
        return next(self._numbers)


def failed(response: ResponseReply, message: str) -> ResponseReply:
    """A response that nothing more will come of."""
    return msgspec.structs.replace(
        response,
        status="failed",
        completed_at=None,
        error=FailedBecause(code=_FAILED, message=message),
    )
