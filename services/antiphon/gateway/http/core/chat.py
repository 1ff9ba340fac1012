"""Shared by the chat APIs: how tools and reasoning change a request's prompt and its output."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.parsing.answer import AnswerParser
from antiphon.gateway.parsing.events import CallEnd, Content, Event, Reasoning
from antiphon.gateway.parsing.reasoning import ReasoningFormat
from antiphon.gateway.parsing.tools.choice import ToolPlan
from antiphon.gateway.requests.generation_request import GenerationRequest
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import ThinkingBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.wire.schemas import Json

P = TypeVar("P", bound="ParsedPrompts")

FORMAT_UNKNOWN = (
    "the reasoning format of this model is unknown; set gateway.reasoning_parser "
    "(--reasoning-parser)"
)


def to_json(value: object, field: str) -> Json:
    """Decode raw JSON, which may have values that cannot be decoded, to Python values."""
    return cast("Json", decode(msgspec.json.encode(value), object, field))


@contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Generator[None]:
    """Rename fields in the errors of a body that is parsed in the format of another API."""
    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else rename(error.param)
        error.message = rename(error.message)
        raise


def template_tools(plan: ToolPlan) -> str | None:
    tools = [tool.written for tool in plan.tools]
    return msgspec.json.encode(tools).decode() if tools else None


def template_options(thinking: bool | None, effort: str | None) -> str | None:
    """Return the chat template variables for reasoning, whose names vary by model, as JSON."""
    options: dict[str, object] = {"reasoning_effort": effort} if effort else {}
    if thinking is not None:
        options |= {"enable_thinking": thinking, "thinking": thinking}
    return msgspec.json.encode(options).decode() if options else None


def with_tool_constraints(
    gen_request: GenerationRequest, plan: ToolPlan, format_: ReasoningFormat | None
) -> GenerationRequest:
    """Apply the plan's output constraint, and keep its special tokens in the text."""
    sampling, fields = gen_request.sampling, gen_request.fields
    if plan.grammar is not None:
        if sampling.grammar is None:
            fields = {**fields, "grammar": "tools"}
        sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
    special = bool((plan.format and plan.format.special) or (format_ and format_.special))
    stop = msgspec.structs.replace(
        gen_request.stop, skip_special_tokens=gen_request.stop.skip_special_tokens and not special
    )
    thinking = gen_request.reasoning
    if thinking is not None and plan.format is not None:
        thinking = msgspec.structs.replace(thinking, call_marks=plan.format.marks)
    return msgspec.structs.replace(
        gen_request, sampling=sampling, fields=fields, stop=stop, reasoning=thinking
    )


class ParsedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body. `budget` is the number of reasoning tokens; None without a limit."""

    gen_requests: tuple[GenerationRequest, ...]
    stream: bool
    budget: int | None = None


async def with_reasoning_tokens(parsed: P, tokenizers: TokenizerClient) -> P:
    """Find the tokens that end reasoning, if a constraint or a budget needs them."""
    gen_requests = [await with_end_token(each, tokenizers) for each in parsed.gen_requests]
    if parsed.budget is not None:
        marks, param = (await tokenizers.formats()).reasoning, "max_thinking_tokens"
        gen_requests = [
            await with_thinking_budget(each, parsed.budget, marks, tokenizers, param=param)
            for each in gen_requests
        ]
    return msgspec.structs.replace(parsed, gen_requests=tuple(gen_requests))


async def with_end_token(
    gen_request: GenerationRequest, tokenizers: TokenizerClient
) -> GenerationRequest:
    """Add the token that ends reasoning to the reasoning parameters, if a constraint needs it."""
    if gen_request.reasoning is None or gen_request.sampling.grammar is None:
        return gen_request
    end_id = await tokenizers.token_id_of(gen_request.reasoning.format.end)
    return msgspec.structs.replace(
        gen_request, reasoning=msgspec.structs.replace(gen_request.reasoning, end_id=end_id)
    )


async def with_thinking_budget(
    gen_request: GenerationRequest,
    tokens_max: int,
    marks: ReasoningFormat | None,
    tokenizers: TokenizerClient,
    *,
    param: str,
) -> GenerationRequest:
    """Add a reasoning budget to a request; `param` is the API's name of the budget field.

    Raises:
        InvalidRequest: A thinking_budget processor is set too.
        Unsupported: The delimiters are unknown, or not single tokens.
    """
    if any(isinstance(each, ThinkingBudget) for each in gen_request.sampling.processors):
        text = "cannot be combined with the thinking_budget logits processor"
        raise InvalidRequest.at(param, text)
    if marks is None:
        raise Unsupported.at(param, FORMAT_UNKNOWN)
    begin_id = await tokenizers.token_id_of(marks.begin)
    end_id = await tokenizers.token_id_of(marks.end)
    if begin_id is None or end_id is None:
        text = "not supported by this model: its reasoning delimiters are not single tokens"
        raise Unsupported.at(param, text)
    budget = ThinkingBudget(tokens_max=tokens_max, begin_id=begin_id, closing_ids=(end_id,))
    sampling = msgspec.structs.replace(
        gen_request.sampling, processors=(*gen_request.sampling.processors, budget)
    )
    return msgspec.structs.replace(gen_request, sampling=sampling)


class OutputParserOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the output of a request.

    Without a `reasoning` format, reasoning stays in the content. `calls_before` is the number of
    tool calls in the messages of the request.
    """

    plan: ToolPlan = ToolPlan()
    reasoning: ReasoningFormat | None = None
    stream_reasoning: bool = True
    calls_before: int = 0


class OutputParser:
    """Parser of one output."""

    def __init__(self, options: OutputParserOptions, *, starts_in_reasoning: bool) -> None:
        self.has_tool_calls = False
        self._plain = options.plan.format is None and options.reasoning is None
        self._stream_reasoning = options.stream_reasoning
        self._held_reasoning: list[str] = []
        self._parser = AnswerParser(
            tools=options.plan.format,
            offer=options.plan.offer(calls_before=options.calls_before),
            reasoning=options.reasoning,
            inside=starts_in_reasoning,
        )

    def feed(self, text: str) -> list[Event]:
        if self._plain:
            return [Content(text)] if text else []
        return self._filter_reasoning(self._parser.feed(text))

    def end(self) -> list[Event]:
        if self._plain:
            return []
        return [*self._filter_reasoning(self._parser.end()), *self._flush_reasoning()]

    def _filter_reasoning(self, events: Iterable[Event]) -> list[Event]:
        kept_events: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning) and not self._stream_reasoning:
                self._held_reasoning.append(event.text)
                continue
            if isinstance(event, CallEnd):
                self.has_tool_calls |= event.complete
            kept_events += [*self._flush_reasoning(), event]
        return kept_events

    def _flush_reasoning(self) -> list[Event]:
        reasoning, self._held_reasoning = "".join(self._held_reasoning), []
        return [Reasoning(reasoning)] if reasoning else []
