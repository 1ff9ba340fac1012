"""Writer of responses: complete, or as stream events."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import TokenLogprob, chat_logprobs
from antiphon.gateway.http.core.writer import ResponseWriter, named_event, total_usage
from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    new_id,
)
from antiphon.gateway.http.openai.responses.schema import (
    IncompleteDetails,
    ReasoningOptions,
    ResponseError,
    ResponseReasoning,
    ResponseReply,
    ResponseText,
    State,
    TextFormat,
    TextOptions,
    response_usage,
)
from antiphon.gateway.http.openai.responses.tools import ToolTarget, custom_input
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.token_outputs import TokenOutputsChunk, join_chunks

if TYPE_CHECKING:
    from antiphon.gateway.http.core.chat import OutputParser
    from antiphon.gateway.http.core.limits import Json
    from antiphon.gateway.http.openai.responses.parse import ParsedResponsesRequest
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import ModelName
    from antiphon.wire.sampling import SamplingParams


PersistResponse = Callable[["ResponseReply"], Awaitable[None]]
ResponseEvent = dict[str, object]
"""An event of a stream, by the names of its fields. `sequence_number` has no gaps."""

_ITEM_ENDS: dict[FinishReason, Status] = {FinishReason.STOP: "completed"}
_ENDS: dict[FinishReason, State] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_FAILED = "server_error"
"""OpenAI's error code for all failures after a response has begun."""


def response_event(kind: str, number: int, **fields: object) -> ResponseEvent:
    return {"type": f"response.{kind}", "sequence_number": number, **fields}


def encode_event(event: ResponseEvent) -> bytes:
    return named_event(str(event["type"]), msgspec.json.encode(event))


def stream_error(error: EngineError) -> bytes:
    """Build the event for an error after the headers of a stream were sent.

    The response continues, and its stream can be resumed.
    """
    body = envelope(error).error
    return encode_event(
        {"type": "error", "code": body.code, "message": body.message, "param": body.param}
    )


class ResponseEventBuilder:
    """Turns the output events of one response into events of its stream.

    One item is open at a time; its text is that of the pieces. A message and a reasoning item have
    one content part.
    """

    def __init__(
        self,
        targets: Mapping[str, ToolTarget] = MappingProxyType({}),
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        self.items: list[OutputItem] = []
        self.number = itertools.count().__next__
        self._targets = targets
        self._encrypt = encrypt
        self._item: OutputItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, event: Event, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ResponseEvent]:
        """Add an output event; `logprobs` are those of a content event."""
        match event:
            case Content(text):
                if not isinstance(self._item, MessageItem):
                    message = MessageItem(
                        id=new_id(MessageItem), status="in_progress", role="assistant", content=[]
                    )
                    yield from self._begin(message, OutputText(text=""))
                self._pieces.append(text)
                self._logprobs.extend(logprobs)
                yield self._event(
                    "output_text.delta", content_index=0, delta=text, logprobs=logprobs
                )
            case Reasoning(text):
                if not isinstance(self._item, ReasoningItem):
                    item = ReasoningItem(id=new_id(ReasoningItem), status="in_progress", content=[])
                    yield from self._begin(item, ReasoningText(text=""))
                self._pieces.append(text)
                yield self._event("reasoning_text.delta", content_index=0, delta=text)
            case CallBegin():
                yield from self._begin(self._call(event))
            case CallArguments():
                self._pieces.append(event.text)
                if isinstance(self._item, CustomCallItem):
                    return  # sent once the JSON string of the input is complete
                yield self._event("function_call_arguments.delta", delta=event.text)
            case CallEnd():
                yield from self.end("completed" if event.complete else "incomplete")

    def end(self, status: Status) -> Iterator[ResponseEvent]:
        """End the open item, if there is one."""
        text = "".join(self._pieces)
        done: OutputItem
        match self._item:
            case None:
                return
            case MessageItem() as message:
                part = OutputText(text=text, logprobs=self._logprobs)
                yield self._event(
                    "output_text.done", content_index=0, text=text, logprobs=self._logprobs
                )
                yield self._event("content_part.done", content_index=0, part=part)
                done = msgspec.structs.replace(message, status=status, content=[part])
            case ReasoningItem() as item:
                reasoning = ReasoningText(text=text)
                yield self._event("reasoning_text.done", content_index=0, text=text)
                yield self._event("content_part.done", content_index=0, part=reasoning)
                encrypted = None if self._encrypt is None else self._encrypt(text)
                done = msgspec.structs.replace(
                    item, status=status, content=[reasoning], encrypted_content=encrypted
                )
            case CallItem() as call:
                yield self._event("function_call_arguments.done", name=call.name, arguments=text)
                done = msgspec.structs.replace(call, status=status, arguments=text)
            case CustomCallItem() as call:
                text = custom_input(text)
                yield self._event("custom_tool_call_input.delta", delta=text)
                yield self._event("custom_tool_call_input.done", input=text)
                done = msgspec.structs.replace(call, status=status, input=text)
        ended = self._item_event("output_item.done", done)
        self._item = None
        self.items.append(done)
        yield ended

    def _call(self, event: CallBegin) -> CallItem | CustomCallItem:
        target = self._targets.get(event.name) or ToolTarget(event.name)
        kind, text = (
            (CustomCallItem, {"input": ""}) if target.custom else (CallItem, {"arguments": ""})
        )
        return kind(
            id=new_id(kind),
            status="in_progress",
            call_id=event.id,
            name=target.name,
            namespace=target.namespace,
            **text,
        )

    def _begin(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[ResponseEvent]:
        """Begin an item; the previous one has ended."""
        yield from self.end("completed")
        self._item, self._pieces, self._logprobs = item, [], []
        yield self._item_event("output_item.added", item)
        if part is not None:
            yield self._event("content_part.added", content_index=0, part=part)

    def _item_event(self, kind: str, item: OutputItem) -> ResponseEvent:
        return response_event(kind, self.number(), output_index=len(self.items), item=item)

    def _event(self, kind: str, **fields: object) -> ResponseEvent:
        """Build an event about a part of the open item."""
        assert self._item is not None, "an item has begun"
        place = {"item_id": self._item.id, "output_index": len(self.items)}
        return response_event(kind, self.number(), **place, **fields)


class ResponsesWriter(ResponseWriter):
    """One response, from its initial to its final state."""

    def __init__(
        self,
        initial: ResponseReply,
        parser: OutputParser,
        *,
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
        self._parser = parser
        self._builder = ResponseEventBuilder(targets, encrypt)

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        (answer,) = answers
        (collected,) = answer.choices
        for event in (*collected.deltas, collected.end):
            self._add(event)
        self._set_final_state([answer.usage])
        return msgspec.json.encode(self.response)

    def begin(self) -> bytes:
        return self._state("created") + self._state(self.response.status)

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        begins = b""
        if self.response.status == "queued":
            self.response = msgspec.structs.replace(self.response, status="in_progress")
            begins = self._state("in_progress")
        return begins + b"".join(
            encode_event(item_event) for event in events for item_event in self._add(event)
        )

    def end(self, usages: Sequence[Usage]) -> bytes:
        self._set_final_state(usages)
        return self._close("completed" if self.response.status == "completed" else "incomplete")

    async def persist(self) -> None:
        if self._persist is not None:
            await self._persist(self.response)

    def failure(self, error: EngineError) -> bytes:
        data = b"".join(map(encode_event, self._builder.end("incomplete")))
        response = msgspec.structs.replace(self.response, output=list(self._builder.items))
        self.response = as_failed(response, envelope(error).error.message)
        return data + self._close("failed")

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

    def _state(self, kind: str) -> bytes:
        return encode_event(response_event(kind, self._builder.number(), response=self.response))

    def _close(self, kind: str) -> bytes:
        """Return the last event, again if the first one was not sent because storing failed."""
        if self._end_number is None:
            self._end_number = self._builder.number()
        return encode_event(response_event(kind, self._end_number, response=self.response))


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
