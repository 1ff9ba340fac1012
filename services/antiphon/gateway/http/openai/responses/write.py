"""Writer of responses: complete, or as stream events."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import chat_logprobs
from antiphon.gateway.http.core.output_parser import OutputParser
from antiphon.gateway.http.core.writer import ResponseWriter, total_usage
from antiphon.gateway.http.openai.responses.events import (
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    Queued,
    ResponseEventBuilder,
    ResponseStateEvent,
    encode_event,
)
from antiphon.gateway.http.openai.responses.replies import (
    IncompleteDetails,
    ResponseError,
    ResponseReasoning,
    ResponseReply,
    ResponseText,
    response_usage,
)
from antiphon.gateway.http.openai.responses.schema import ReasoningOptions, TextFormat, TextOptions
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import Content
from antiphon.wire.base import FinishReason
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from antiphon.gateway.http.core.generation_fields import Json
    from antiphon.gateway.http.core.logprobs import TokenLogprob
    from antiphon.gateway.http.core.output_parser import OutputParserOptions
    from antiphon.gateway.http.openai.responses.events import ResponseEvent
    from antiphon.gateway.http.openai.responses.items import Status
    from antiphon.gateway.http.openai.responses.parse import ParsedResponsesRequest
    from antiphon.gateway.http.openai.responses.replies import State
    from antiphon.gateway.http.openai.responses.tools import ToolTarget
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import ModelName
    from antiphon.wire.sampling import SamplingParams
    from antiphon.wire.token_outputs import TokenOutputsChunk


PersistResponse = Callable[["ResponseReply"], Awaitable[None]]

_ITEM_ENDS: dict[FinishReason, Status] = {FinishReason.STOP: "completed"}
_ENDS: dict[FinishReason, State] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_FAILED = "server_error"
"""OpenAI's error code for all failures after a response has begun."""


class ResponsesWriter(ResponseWriter):
    """One response, from its initial to its final state."""

    def __init__(
        self,
        initial: ResponseReply,
        parser_options: OutputParserOptions,
        *,
        starts_in_reasoning: bool,
        logprobs: bool,
        now: Callable[[], int],
        persist: PersistResponse | None = None,
        targets: Mapping[str, ToolTarget],
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        self.response = initial
        self._now = now
        self._persist = persist
        self._end_number: int | None = None
        self._logprobs = logprobs
        self._unsent_outputs: list[TokenOutputsChunk] = []
        self._reason = FinishReason.STOP
        self._parser = OutputParser(parser_options, starts_in_reasoning=starts_in_reasoning)
        self._numbers = itertools.count()
        self._builder = ResponseEventBuilder(self._number, targets, encrypt)

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        (answer,) = answers
        (collected,) = answer.choices
        for event in (*collected.deltas, collected.end):
            self._add(event)
        self._set_final_state([answer.usage])
        return msgspec.json.encode(self.response)

    def begin(self) -> bytes:
        then = Queued if self.response.status == "queued" else InProgress
        return self._state(Created) + self._state(then)

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        begins = b""
        if self.response.status == "queued":
            self.response = msgspec.structs.replace(self.response, status="in_progress")
            begins = self._state(InProgress)
        return begins + b"".join(
            encode_event(item_event) for event in events for item_event in self._add(event)
        )

    def end(self, usages: Sequence[Usage]) -> bytes:
        self._set_final_state(usages)
        return self._close(Completed if self.response.status == "completed" else Incomplete)

    async def persist(self) -> None:
        if self._persist is not None:
            await self._persist(self.response)

    def failure(self, error: EngineError) -> bytes:
        data = b"".join(map(encode_event, self._builder.end("incomplete")))
        response = msgspec.structs.replace(self.response, output=list(self._builder.items))
        self.response = as_failed(response, envelope(error).error.message)
        return data + self._close(Failed)

    def _add(self, event: TextDelta | Finished) -> list[ResponseEvent]:
        if isinstance(event, TextDelta):
            return list(self._text_events(event))
        self._reason = event.reason
        rest = [
            item_event
            for parsed_event in self._parser.end()
            for item_event in self._builder.add(parsed_event)
        ]
        return [*rest, *self._builder.end(_ITEM_ENDS.get(event.reason, "incomplete"))]

    def _text_events(self, delta: TextDelta) -> Iterator[ResponseEvent]:
        """Add logprobs to content events: they wait, since the parser may hold text back."""
        events = self._parser.feed(delta.text)
        if delta.details is not None and self._logprobs:
            self._unsent_outputs.append(delta.details)
        for event in events:
            if isinstance(event, Content):
                yield from self._builder.add(event, self._logprobs_of_pending())
            else:
                yield from self._builder.add(event)
        if events:
            self._unsent_outputs.clear()  # they belong to reasoning or to a tool call

    def _logprobs_of_pending(self) -> list[TokenLogprob]:
        piece = join_chunks(self._unsent_outputs)
        self._unsent_outputs.clear()
        logprobs = chat_logprobs(piece)
        return [] if logprobs is None else logprobs.content

    def _set_final_state(self, usages: Iterable[Usage]) -> None:
        """Set the final state. Idempotent."""
        status = _ENDS.get(self._reason, "failed")
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
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
        """Return the last event, again if the first one was not sent because storing failed."""
        if self._end_number is None:
            self._end_number = self._number()
        return encode_event(kind(sequence_number=self._end_number, response=self.response))

    def _number(self) -> int:
        return next(self._numbers)


def as_failed(response: ResponseReply, message: str) -> ResponseReply:
    return msgspec.structs.replace(
        response,
        status="failed",
        completed_at=None,
        error=ResponseError(code=_FAILED, message=message),
    )


def draft(
    parsed: ParsedResponsesRequest,
    sampling: SamplingParams,
    *,
    model: ModelName,
    now: int,
    store: bool,
) -> ResponseReply:
    body = parsed.body
    return ResponseReply(
        id=parsed.id,
        created_at=now,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ResponseReasoning(effort=(body.reasoning or ReasoningOptions()).effort),
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=ResponseText(
            format=_format(body.text),
            verbosity=(body.text or TextOptions()).verbosity or "medium",
        ),
        tool_choice=body.tool_choice or "auto",
        tools=list(parsed.tools.response_tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _format(text: TextOptions | None) -> Json:
    """Return the text format as sent, without unset fields."""
    format_ = (text or TextOptions()).format or TextFormat()
    given = {"name": format_.name, "description": format_.description, "strict": format_.strict}
    fields: dict[str, object] = {"type": format_.type}
    if format_.type == "json_schema":
        fields |= {name: value for name, value in given.items() if value is not None}
        fields["schema"] = format_.schema
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])
