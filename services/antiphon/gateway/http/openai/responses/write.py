"""How clients hear a response: whole, or by the events of its stream."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import chat_logprobs
from antiphon.gateway.http.core.output_parser import OutputParser
from antiphon.gateway.http.core.writer import ResponseWriter, total_usage
from antiphon.gateway.http.openai.responses.event_builder import ResponseEventBuilder
from antiphon.gateway.http.openai.responses.events import (
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    Queued,
    ResponseStateEvent,
    encode_event,
)
from antiphon.gateway.http.openai.responses.replies import (
    FailedBecause,
    IncompleteBecause,
    response_usage,
)
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import Content
from antiphon.wire.base import FinishReason
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from antiphon.gateway.http.core.logprobs import TokenLogprob
    from antiphon.gateway.http.core.output_parser import OutputParserOptions
    from antiphon.gateway.http.openai.responses.events import ResponseEvent
    from antiphon.gateway.http.openai.responses.items import Status
    from antiphon.gateway.http.openai.responses.replies import ResponseReply, State
    from antiphon.gateway.http.openai.responses.tools import ToolTarget
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.token_outputs import TokenOutputsChunk

PersistResponse = Callable[["ResponseReply"], Awaitable[None]]

_ITEM_ENDS: dict[FinishReason, Status] = {FinishReason.STOP: "completed"}
_ENDS: dict[FinishReason, State] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_FAILED = "server_error"
"""What OpenAI's clients know of all that goes wrong after a response has begun."""


class ResponsesWriter(ResponseWriter):
    """One response, from its beginning to its end.

    Attributes:
        response: As it stands.
    """

    def __init__(
        self,
        begun: ResponseReply,
        parser_options: OutputParserOptions,
        *,
        inside: bool,
        logprobs: bool,
        now: Callable[[], int],
        keep: PersistResponse | None = None,
        targets: Mapping[str, ToolTarget],
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """Nothing was said yet.

        Args:
            begun: The response with no output.
            parser_options: How the answer is taken apart.
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
        self._unsent_outputs: list[TokenOutputsChunk] = []
        self._reason = FinishReason.STOP
        self._parser = OutputParser(parser_options, starts_in_reasoning=inside)
        self._numbers = itertools.count()
        self._builder = ResponseEventBuilder(self._number, targets, seal)

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        """The response, ended."""
        (answer,) = answers
        (collected,) = answer.choices
        for said in (*collected.said, collected.end):
            self._add(said)
        self._set_final_state([answer.usage])
        return msgspec.json.encode(self.response)

    def begin(self) -> bytes:
        """It exists, and is being made, or will be."""
        then = Queued if self.response.status == "queued" else InProgress
        return self._state(Created) + self._state(then)

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """Events of its items."""
        begins = b""
        if self.response.status == "queued":
            self.response = msgspec.structs.replace(self.response, status="in_progress")
            begins = self._state(InProgress)
        return begins + b"".join(
            encode_event(told) for event in events for told in self._add(event)
        )

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The response as it is for ever."""
        self._set_final_state(usages)
        return self._close(Completed if self.response.status == "completed" else Incomplete)

    async def persist(self) -> None:
        """Keep the response as it stands."""
        if self._keep is not None:
            await self._keep(self.response)

    def failure(self, error: EngineError) -> bytes:
        """The response with the error that ended it, and what was said before."""
        told = b"".join(map(encode_event, self._builder.end("incomplete")))
        said = msgspec.structs.replace(self.response, output=list(self._builder.items))
        self.response = as_failed(said, envelope(error).error.message)
        return told + self._close(Failed)

    def _add(self, said: TextDelta | Finished) -> list[ResponseEvent]:
        if isinstance(said, TextDelta):
            return list(self._text_events(said))
        self._reason = said.reason
        rest = [told for event in self._parser.end() for told in self._builder.add(event)]
        return [*rest, *self._builder.end(_ITEM_ENDS.get(said.reason, "incomplete"))]

    def _text_events(self, said: TextDelta) -> Iterator[ResponseEvent]:
        """Log-probabilities wait for the next content: text may be held back before it is one."""
        events = self._parser.feed(said.text)
        if said.details is not None and self._logprobs:
            self._unsent_outputs.append(said.details)
        for event in events:
            if isinstance(event, Content):
                yield from self._builder.add(event, self._logprobs_of_pending())
            else:
                yield from self._builder.add(event)
        if events:
            self._unsent_outputs.clear()  # they were of thinking, or of a call

    def _logprobs_of_pending(self) -> list[TokenLogprob]:
        piece = join_chunks(self._unsent_outputs)
        self._unsent_outputs.clear()
        told = chat_logprobs(piece)
        return [] if told is None else told.content

    def _set_final_state(self, usages: Iterable[Usage]) -> None:
        """Write down how it has ended. Twice is as good as once."""
        status = _ENDS.get(self._reason, "failed")
        cut = IncompleteBecause("max_output_tokens") if status == "incomplete" else None
        ended_at = self.response.completed_at or self._now()
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=ended_at if status == "completed" else None,
            incomplete_details=cut,
            output=list(self._builder.items),
            usage=response_usage(total_usage(list(usages))),
        )

    def _state(self, kind: type[ResponseStateEvent]) -> bytes:
        return encode_event(kind(sequence_number=self._number(), response=self.response))

    def _close(self, kind: type[ResponseStateEvent]) -> bytes:
        """The last event. One that was not sent, as its response was not kept, is told anew."""
        if self._end_number is None:
            self._end_number = self._number()
        return encode_event(kind(sequence_number=self._end_number, response=self.response))

    def _number(self) -> int:
        return next(self._numbers)


def as_failed(response: ResponseReply, message: str) -> ResponseReply:
    """A response that nothing more will come of."""
    return msgspec.structs.replace(
        response,
        status="failed",
        completed_at=None,
        error=FailedBecause(code=_FAILED, message=message),
    )
