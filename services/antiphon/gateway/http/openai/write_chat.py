"""Writer of chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.logprobs import (
    chat_logprobs,
)
from antiphon.gateway.http.core.output_parser import OutputParser
from antiphon.gateway.http.openai.replies import (
    UNSET,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatFinish,
    ChatReply,
    Delta,
    EmptyDelta,
    ToolCallFunction,
    ToolCallReply,
)
from antiphon.gateway.http.openai.write import OpenAiResponseWriter
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Collector,
    Content,
    Reasoning,
)
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.generate_outputs import GenerateOutputs
    from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
    from antiphon.gateway.http.openai.write import CompletionHeader
    from antiphon.gateway.parsing.events import Event
    from antiphon.gateway.stream.group import CollectedChoice, CollectedResponse
    from antiphon.gateway.stream.stream import RequestStream


class ChatResponseWriter(OpenAiResponseWriter):
    CHUNK = "chat.completion.chunk"

    def __init__(
        self,
        header: CompletionHeader,
        streams: Sequence[RequestStream],
        reply_options: OpenAiResponseOptions,
        *,
        cached: bool,
        record: GenerateOutputs | None = None,
    ) -> None:
        super().__init__(header, streams, reply_options, cached=cached, record=record)
        inside = streams[0].starts_in_reasoning
        self._parsers = [
            OutputParser(reply_options.parser_options, starts_in_reasoning=inside)
            for _ in range(reply_options.choices)
        ]

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        (answer,) = answers
        if self._record is not None:
            self._record.add_all(answers)
        choices = [self._choice(index, one) for index, one in enumerate(answer.choices)]
        reply = ChatReply(choices=choices, **self._reply_fields(answers))
        return msgspec.json.encode(reply)

    def begin(self) -> bytes:
        delta = Delta(role="assistant", content="")
        return b"".join(
            self._event(
                ChatChunkChoice(
                    index=index, delta=delta, prompt_token_ids=self._prompt_ids_once(0, index)
                ),
                usage=self._usage_so_far(0, None),
            )
            for index in range(self._options.choices)
        )

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """Return a chunk for each text, and an empty one for the end of a choice."""
        self._record_events(prompt, events)
        return b"".join(map(self._chunk, events))

    def _choice(self, index: int, collected: CollectedChoice) -> ChatChoice:
        details = collected.details
        parser = self._parsers[index]
        events = [*parser.feed(collected.text), *parser.end()]
        return ChatChoice(
            index=index,
            message=_message(events),
            logprobs=chat_logprobs(details) if self._options.logprobs else None,
            finish_reason=_reason(collected.end, parser),
            matched_stop=collected.end.matched_stop,
            hidden_states=self._hidden_states(details),
            prompt_token_ids=self._prompt_ids[0],
            response_token_ids=self._ids(details),
            meta_info=self._meta_info(index, 0, collected.end),
        )

    def _chunk(self, choice_event: TextDelta | Finished) -> bytes:
        parser = self._parsers[choice_event.choice]
        if isinstance(choice_event, TextDelta):
            events = parser.feed(choice_event.text)
            if self._bare and len(events) == 1 and isinstance(events[0], Content):
                return self._text_event(choice_event.choice, events[0].text)
            deltas = list(map(_delta, events))
            return self._choice_chunks(
                choice_event, [delta for delta in deltas if delta is not None]
            )
        rest = (_delta(parsed_event) for parsed_event in parser.end())
        usage = self._usage_so_far(0, None)
        chunks = [
            self._event(ChatChunkChoice(index=choice_event.choice, delta=delta), usage=usage)
            for delta in rest
            if delta is not None
        ]
        end = ChatChunkChoice(
            index=choice_event.choice,
            delta=EmptyDelta(),
            finish_reason=_reason(choice_event, parser),
            matched_stop=choice_event.matched_stop,
            meta_info=self._meta_info(choice_event.choice, 0, choice_event),
        )
        chunks.append(self._event(end, usage=usage))
        states = self._take_hidden_states(choice_event.choice)
        if states is not UNSET:
            states_choice = ChatChunkChoice(
                index=choice_event.choice, delta=EmptyDelta(hidden_states=states)
            )
            chunks.append(self._event(states_choice))
        return b"".join(chunks)

    def _choice_chunks(self, text_delta: TextDelta, deltas: list[Delta]) -> bytes:
        """Return a chunk per delta: the first has the token outputs, each has usage."""
        usage = self._usage_so_far(0, text_delta)
        self._collect_hidden_states(text_delta.choice, text_delta.details)
        if (
            not deltas
            and not self._bare
            and (text_delta.details is not None or (usage and text_delta.usage))
        ):
            deltas = [Delta(content="")]
        chunks: list[bytes] = []
        for number, delta in enumerate(deltas):
            details = text_delta.details if number == 0 else None
            choice = ChatChunkChoice(
                index=text_delta.choice,
                delta=delta,
                logprobs=chat_logprobs(details) if self._options.logprobs else None,
                response_token_ids=self._ids(details),
            )
            chunks.append(self._event(choice, usage=usage))
        return b"".join(chunks)

    def _text_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=Delta(content=text))


def _delta(event: Event) -> Delta | None:
    match event:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case CallBegin(index, call_id, name):
            function = ToolCallFunction(name=name, arguments="")
            return Delta(tool_calls=[ToolCallReply(id=call_id, index=index, function=function)])
        case CallArguments(index, text):
            function = ToolCallFunction(arguments=text)
            return Delta(tool_calls=[ToolCallReply(index=index, function=function)])
        case CallEnd():
            return None


def _message(events: Sequence[Event]) -> AnswerMessage:
    collector = Collector()
    for each in events:
        collector.add(each)
    parsed = collector.parsed()
    calls = [
        ToolCallReply(
            id=call.id,
            index=call.index,
            function=ToolCallFunction(name=call.name, arguments=call.arguments),
        )
        for call in parsed.calls
    ]
    return AnswerMessage(
        content=None if calls and not parsed.content else parsed.content,
        reasoning_content=parsed.reasoning or None,
        tool_calls=calls or None,
    )


def _reason(finished: Finished, parser: OutputParser) -> ChatFinish:
    """Return the finish reason; tool calls count only if the model ended its turn."""
    if finished.reason is FinishReason.STOP and parser.has_tool_calls:
        return ChatFinish.TOOL_CALLS
    return ChatFinish(finished.reason.value)
