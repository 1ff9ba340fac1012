"""Writers of chat and text completions, and what they share."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from antiphon.gateway.http.core.chat import OutputParser
from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import TextLogprobs, chat_logprobs, text_logprobs
from antiphon.gateway.http.core.meta_info import (
    CachedTokensDetails,
    GenerateOutputs,
    MetaInfo,
    output_ids,
)
from antiphon.gateway.http.core.writer import DONE, ResponseWriter, event, total_usage
from antiphon.gateway.http.openai.schema import (
    UNSET,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatFinish,
    ChatReply,
    CompletionReply,
    Delta,
    EmptyDelta,
    Extension,
    Metadata,
    OpenAiChunk,
    TextChoice,
    TextReply,
    ToolCallFunction,
    ToolCallReply,
    UnsetType,
    UsageBody,
    usage_body,
)
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    collect,
)
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
    from antiphon.gateway.stream.stream import CollectedChoice, CollectedResponse, RequestStream
    from antiphon.wire.errors import EngineError
    from antiphon.wire.token_outputs import TokenOutputsChunk

GAP = "\0"
"""Stands for the text; no other part of a chunk is written unescaped."""
_GAP_JSON = msgspec.json.encode(GAP)


class CompletionHeader(msgspec.Struct, frozen=True):
    """Fields of every response; `weight_version` is reported if no worker has reported one."""

    id: str
    created: int
    model: str
    weight_version: str


class OpenAiResponseWriter(ResponseWriter):
    """Base writer. Choices are indexed over all prompts."""

    RESUMABLE = True

    CHUNK: ClassVar[Literal["chat.completion.chunk", "text_completion"]]
    REPLY: ClassVar[type[CompletionReply]]

    def __init__(
        self,
        header: CompletionHeader,
        streams: Sequence[RequestStream],
        options: OpenAiResponseOptions,
        *,
        cached: bool,
        record: GenerateOutputs | None = None,
    ) -> None:
        self._header = header
        self._options = options
        self._bare = options.bare
        self._cached = cached
        self._record = record
        self._streams = streams
        self._frames: dict[int, Frame] = {}
        self._sent_ids: dict[int, list[int]] = {}
        self._hidden: dict[int, list[list[float]]] = {}
        self._usages = [
            Usage(prompt_tokens=len(unpack_ids(stream.submit.prompt_ids)))
            if options.usage_always
            else Usage()
            for stream in streams
        ]
        self._prompt_ids = [
            list(unpack_ids(stream.submit.prompt_ids)) if options.prompt_ids else UNSET
            for stream in streams
        ]
        self._unsent_prompts = set(range(options.n * len(streams)))

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        if self._record is not None:
            self._record.add_all(answers)
        usages = [answer.usage for answer in answers]
        reply = self.REPLY(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=self._choices(answers),  # before the extension, which has their ids
            usage=self._usage(usages),
            metadata=Metadata(answers[-1].weight_version or self._header.weight_version),
            sglext=self._extension(usages),
        )
        return msgspec.json.encode(reply)

    @abstractmethod
    def _choices(self, answers: Sequence[CollectedResponse]) -> Sequence[ChatChoice | TextChoice]:
        pass

    def end(self, usages: Sequence[Usage]) -> bytes:
        extension = self._extension(usages)
        data = b"" if extension is UNSET else self._event(sglext=extension)
        if self._options.usage_last:
            data += self._event(usage=self._usage(usages))
        return data + DONE

    def failure(self, error: EngineError) -> bytes:
        return event(msgspec.json.encode(envelope(error))) + DONE

    async def persist(self) -> None:
        if self._record is not None:
            await self._record.persist()

    def _event(
        self,
        *choices: ChatChunkChoice | TextChoice,
        usage: UsageBody | None = None,
        sglext: Extension | UnsetType = UNSET,
    ) -> bytes:
        chunk = OpenAiChunk(
            id=self._header.id,
            object=self.CHUNK,
            created=self._header.created,
            model=self._header.model,
            choices=choices,
            usage=usage,
            sglext=sglext,
        )
        return event(msgspec.json.encode(chunk))

    def _text_event(self, index: int, text: str) -> bytes:
        """Return a chunk with text only."""
        if (frame := self._frames.get(index)) is None:
            frame = self._frames[index] = Frame(self._event(self._text_choice(index, GAP)))
        return frame.around(text)

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> ChatChunkChoice | TextChoice:
        pass

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._options.n + choice

    def _usage(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(total_usage(usages), cached=self._cached)

    def _extension(self, usages: Sequence[Usage]) -> Extension | UnsetType:
        reply_options = self._options
        if not (
            reply_options.return_cached_tokens_details
            or reply_options.return_input_ids_in_sglext
            or reply_options.return_output_ids_in_sglext
        ):
            return UNSET
        device = total_usage(usages).cached_tokens
        prompts = [list(unpack_ids(stream.submit.prompt_ids)) for stream in self._streams]
        answers = [ids for _, ids in sorted(self._sent_ids.items())]
        return Extension(
            cached_tokens_details=CachedTokensDetails(device=device)
            if reply_options.return_cached_tokens_details
            else UNSET,
            input_ids=_flat(prompts) if reply_options.return_input_ids_in_sglext else UNSET,
            output_ids=_flat(answers) if reply_options.return_output_ids_in_sglext else UNSET,
        )

    def _record_events(self, prompt: int, events: Sequence[TextDelta | Finished]) -> None:
        if self._record is not None:
            for each in events:
                self._record.add(prompt, each)

    def _meta_info(self, index: int, prompt: int, finished: Finished) -> MetaInfo | UnsetType:
        """Return the `meta_info` of a finished choice; ids are returned separately at the end."""
        if self._record is None:
            return UNSET
        number = self._record.index(prompt, finished.choice)
        self._sent_ids[index] = self._record.replies[number].ids
        return self._record.meta_info(number) if self._options.return_meta_info else UNSET

    def _usage_so_far(self, prompt: int, delta: TextDelta | None) -> UsageBody | None:
        if not self._options.usage_always:
            return None
        if delta is not None and delta.usage is not None:
            self._usages[prompt] = delta.usage
        return self._usage(self._usages)

    def _prompt_ids_once(self, prompt: int, choice: int) -> list[int] | UnsetType:
        """Return the prompt token ids with the first chunk of each choice."""
        index = self._index(prompt, choice)
        if index not in self._unsent_prompts:
            return UNSET
        self._unsent_prompts.discard(index)
        return self._prompt_ids[prompt]

    def _collect_hidden_states(self, index: int, piece: TokenOutputsChunk | None) -> None:
        """Collect hidden states of a choice, which a stream sends once at its end."""
        states = self._hidden_states(piece)
        if states is not UNSET:
            self._hidden.setdefault(index, []).extend(states)

    def _take_hidden_states(self, index: int) -> list[list[float]] | UnsetType:
        return self._hidden.pop(index, []) if self._options.return_hidden_states else UNSET

    def _hidden_states(self, piece: TokenOutputsChunk | None) -> list[list[float]] | UnsetType:
        if not self._options.return_hidden_states or piece is None:
            return UNSET
        return [list(token.hidden) for token in piece.details.iter_tokens()]

    def _ids(self, piece: TokenOutputsChunk | None) -> list[int] | UnsetType:
        return output_ids(piece) if self._options.return_token_ids and piece else UNSET


def _flat(rows: list[list[int]]) -> list[int | list[int]]:
    """Return lists of ids, or the single list itself."""
    return [*rows[0]] if len(rows) == 1 else [*rows]


class Frame:
    """The JSON around the text. Consecutive chunks of a choice differ only in their text."""

    def __init__(self, chunk: bytes) -> None:
        """Create from a chunk whose text is `GAP`."""
        self._before, gap, self._after = chunk.partition(_GAP_JSON)
        assert gap, "a chunk without its text"

    def around(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


class ChatResponseWriter(OpenAiResponseWriter):
    CHUNK = "chat.completion.chunk"
    REPLY = ChatReply

    @cached_property
    def _parsers(self) -> list[OutputParser]:
        options, inside = self._options, self._streams[0].starts_in_reasoning
        return [
            OutputParser(options.parser_options, starts_in_reasoning=inside)
            for _ in range(options.n)
        ]

    def _choices(self, answers: Sequence[CollectedResponse]) -> list[ChatChoice]:
        (answer,) = answers
        return [self._choice(index, one) for index, one in enumerate(answer.choices)]

    def begin(self) -> bytes:
        delta = Delta(role="assistant", content="")
        return b"".join(
            self._event(
                ChatChunkChoice(
                    index=index, delta=delta, prompt_token_ids=self._prompt_ids_once(0, index)
                ),
                usage=self._usage_so_far(0, None),
            )
            for index in range(self._options.n)
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
    parsed = collect(events)
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


class PromptEcho(msgspec.Struct, frozen=True):
    """A prompt to echo, and the text of its first token."""

    text: str = ""
    first: str = ""


class CompletionResponseWriter(OpenAiResponseWriter):
    CHUNK = "text_completion"
    REPLY = TextReply

    def __init__(
        self,
        header: CompletionHeader,
        streams: Sequence[RequestStream],
        options: OpenAiResponseOptions,
        *,
        cached: bool,
        echoes: Sequence[PromptEcho],
        record: GenerateOutputs | None = None,
    ) -> None:
        super().__init__(header, streams, options, cached=cached, record=record)
        self._echoes = echoes
        self._characters = [0] * (options.n * len(streams))
        self._begun: set[int] = set()

    def _choices(self, answers: Sequence[CollectedResponse]) -> list[TextChoice]:
        """Return the choices of every prompt, or the best ones."""
        return [
            self._choice(prompt, number, collected)
            for prompt, answer in enumerate(answers)
            for number, collected in enumerate(best_of(answer.choices, self._options.n))
        ]

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """Return a chunk for each text; the last one of a choice has its finish reason."""
        self._record_events(prompt, events)
        if len(events) == 1 and self._bare and isinstance(only := events[0], TextDelta):
            index = self._index(prompt, only.choice)
            if index in self._begun:
                return self._text_event(index, only.text)
        chunks: list[bytes] = []
        for choice, only, finished in _merge_finish(events):
            index = self._index(prompt, choice)
            self._collect_hidden_states(index, only.details if only else None)
            piece = self._piece(prompt, choice, only, finished)
            chunks.append(self._event(piece, usage=self._usage_so_far(prompt, only)))
            states = self._take_hidden_states(index) if finished else UNSET
            if states is not UNSET:
                states_choice = TextChoice(index=index, text="", hidden_states=states)
                chunks.append(self._event(states_choice))
        return b"".join(chunks)

    def _piece(
        self,
        prompt: int,
        number: int,
        output: TextDelta | CollectedChoice | None,
        finished: Finished | None,
    ) -> TextChoice:
        """Return a choice, or a chunk of one; its first has the prompt."""
        index, details = self._index(prompt, number), output.details if output else None
        echo = self._echoes[prompt] if index not in self._begun else PromptEcho()
        self._begun.add(index)
        return TextChoice(
            index=index,
            text=echo.text + (output.text if output else ""),
            logprobs=self._logprobs(index, details, echo),
            finish_reason=finished.reason if finished else None,
            matched_stop=finished.matched_stop if finished else None,
            prompt_token_ids=self._prompt_ids_once(prompt, number),
            response_token_ids=self._ids(details),
            meta_info=self._meta_info(index, prompt, finished) if finished else UNSET,
        )

    def _logprobs(
        self, index: int, details: TokenOutputsChunk | None, echo: PromptEcho
    ) -> TextLogprobs | None:
        if not self._options.logprobs:
            return None
        before = (echo.first,) if echo.first else ()
        if (logprobs := text_logprobs(details, self._characters[index], before)) is not None:
            self._characters[index] += sum(map(len, logprobs.tokens))
        return logprobs

    def _choice(self, prompt: int, number: int, collected: CollectedChoice) -> TextChoice:
        choice = self._piece(prompt, number, collected, collected.end)
        states = self._hidden_states(collected.details)
        return msgspec.structs.replace(choice, hidden_states=states)

    def _text_choice(self, index: int, text: str) -> TextChoice:
        return TextChoice(index=index, text=text)


def best_of(choices: Sequence[CollectedChoice], count: int) -> Sequence[CollectedChoice]:
    """Return the choices with the highest mean logprob per token, the best first."""
    if len(choices) == count:
        return choices
    return sorted(choices, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(collected: CollectedChoice) -> float:
    piece = collected.details
    logprobs = (
        [
            token.logprob
            for offset, token in enumerate(piece.details.iter_tokens(), piece.offset)
            if offset >= 0 and token.logprob is not None
        ]
        if piece is not None
        else []
    )
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _merge_finish(
    events: Sequence[TextDelta | Finished],
) -> Iterator[tuple[int, TextDelta | None, Finished | None]]:
    """Merge the end of a choice into the text right before it."""
    last: TextDelta | None = None
    for each in events:
        if isinstance(each, Finished):
            together = last is not None and last.choice == each.choice
            if last is not None and not together:
                yield last.choice, last, None
            yield each.choice, last if together else None, each
            last = None
        else:
            if last is not None:
                yield last.choice, last, None
            last = each
    if last is not None:
        yield last.choice, last, None
