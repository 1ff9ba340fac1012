"""Parses bodies of /api/chat and /api/generate into requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.gateway.http.core import fields
from antiphon.gateway.http.core.chat import (
    FORMAT_UNKNOWN,
    OutputParserOptions,
    template_options,
    template_tools,
    to_json,
    with_tool_constraints,
)
from antiphon.gateway.http.core.image_options import limits_of
from antiphon.gateway.http.core.sampling_fields import as_tuple, schema_grammar
from antiphon.gateway.http.ollama.schema import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
    OllamaTurn,
)
from antiphon.gateway.parsing.tools.choice import plan_tools, read_choice
from antiphon.gateway.parsing.tools.tool import read_tools
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    ReasoningParams,
    SamplingOptions,
    media_fields,
)
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import Grammar, GrammarKind, StopStrings, TokenOutputParams
from antiphon.wire.tokenize import ChatMessage, MessagePart, MessageToolCall, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.limits import Json
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.wire.ids import ModelName
    from antiphon.wire.schemas import Json as JsonValue

_LATEST = "latest"
_FIELDS = {
    "grammar": "format",
    "details.logprobs": "logprobs",
    "details.top": "top_logprobs",
    "details.named_ids": "logprobs",
    "mm_processor_kwargs": "options",
}


class ParsedOllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body: its request, and the options of the response."""

    gen_request: GenerationRequest
    stream: bool
    logprobs: bool
    parser_options: OutputParserOptions = OutputParserOptions()


def parse_chat(
    body: OllamaChatBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOllamaRequest | None:
    """Parse a chat; None if it has no messages and only checks that the model is ready."""
    if not body.messages:
        return _is_load_request(body, served)
    last, media = body.messages[-1], _images(body.messages)
    gen_request = GenerationRequest(
        api="ollama_chat",
        model=model_of(body.model, served),
        messages=_conversation(body.messages),
        media=media,
        fields=media_fields(media),
        continue_final_message=last.role == "assistant"
        and bool(last.content)
        and not last.tool_calls,
    )
    return _chat(gen_request, body, body.tools or [], formats)


def parse_generate(
    body: OllamaGenerateBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOllamaRequest | None:
    """Parse a prompt; None if it is empty and only checks that the model is ready."""
    if not body.prompt and not body.suffix:
        return _is_load_request(body, served)
    media = tuple(
        MediumSource(image, f"images[{index}]") for index, image in enumerate(body.images or ())
    )
    gen_request = GenerationRequest(
        api="ollama_generate",
        model=model_of(body.model, served),
        fields={"messages": "prompt"} | media_fields(media),
        media=media,
    )
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return _raw(
            msgspec.structs.replace(gen_request, prompt=prompt, suffix=body.suffix or None), body
        )
    system = (ChatMessage(role="system", content=body.system),) if body.system else ()
    user = ChatMessage(role="user", content=prompt, parts=_parts(len(media), 0, prompt))
    messages = (*system, user)
    return _chat(msgspec.structs.replace(gen_request, messages=messages), body, [], formats)


def tagged(name: str) -> str:
    """Return a model name with its tag, `latest` by default."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def model_of(name: str | None, served: Sequence[ModelName]) -> str | None:
    """Return the requested model; None for the served one."""
    if name and tagged(name) in map(tagged, served):
        return None
    return fields.model_of(name)


def _is_load_request(body: OllamaBody, served: Sequence[ModelName]) -> None:
    if model_of(body.model, served) is None and _unloads(body.keep_alive):
        raise Unsupported.at("keep_alive", "unloading is not supported; the model stays loaded")


def _unloads(keep_alive: str | float | None) -> bool:
    if isinstance(keep_alive, str):
        return not keep_alive.strip("0.hmnuµs") and "0" in keep_alive
    return keep_alive == 0


def _chat(
    gen_request: GenerationRequest, body: OllamaBody, tools: Sequence[Json], formats: Formats
) -> ParsedOllamaRequest:
    reasoning = formats.reasoning
    if body.think and reasoning is None:
        raise Unsupported.at("think", FORMAT_UNKNOWN)
    gen_request = _with_common_fields(gen_request, body)
    offered = read_tools(cast("list[JsonValue]", to_json(tools, "tools")))
    plan = plan_tools(
        offered,
        read_choice(None, offered),
        formats.tools,
        parallel=True,
        constraint=gen_request.sampling.grammar,
    )
    thinking = None if body.think is None else bool(body.think)
    gen_request = msgspec.structs.replace(
        gen_request,
        template=TemplateParams(
            options=template_options(thinking, body.think if isinstance(body.think, str) else None),
            tools=template_tools(plan),
        ),
        reasoning=None
        if reasoning is None
        else ReasoningParams(format=reasoning, enabled=thinking if reasoning.switch else None),
    )
    return ParsedOllamaRequest(
        gen_request=with_tool_constraints(gen_request, plan, reasoning),
        stream=body.stream is not False,
        logprobs=bool(body.logprobs),
        parser_options=OutputParserOptions(
            plan=plan,
            reasoning=reasoning,
            calls_before=sum(len(message.tool_calls) for message in gen_request.messages or ()),
        ),
    )


def _raw(gen_request: GenerationRequest, body: OllamaGenerateBody) -> ParsedOllamaRequest:
    if body.images:
        raise InvalidRequest.at("images", "cannot be combined with raw or suffix")
    if body.system:
        raise InvalidRequest.at("system", "cannot be combined with raw; include it in the prompt")
    if body.think:
        raise InvalidRequest.at("think", "cannot be combined with raw")
    return ParsedOllamaRequest(
        gen_request=_with_common_fields(gen_request, body),
        stream=body.stream is not False,
        logprobs=bool(body.logprobs),
    )


def _with_common_fields(gen_request: GenerationRequest, body: OllamaBody) -> GenerationRequest:
    options = body.options or OllamaOptions()
    for name, why in OllamaOptions.UNSUPPORTED.items():
        value: object = getattr(options, name)
        if value is not None and value not in why.neutral:
            raise Unsupported.at(f"options.{name}", why.reason)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
    outputs = TokenOutputParams(logprobs=True, top=body.top_logprobs or 0)
    sampling = SamplingOptions(
        grammar=_grammar(body.format), details=outputs if body.logprobs else None
    ).with_fields_of(options)
    limit = options.num_predict
    return msgspec.structs.replace(
        gen_request,
        # A limit that exceeds the context is accepted.
        tokens_default=None if limit is None or limit < 0 else limit,
        sampling=msgspec.structs.replace(
            sampling,
            top_k=-1 if options.top_k is not None and options.top_k <= 0 else options.top_k,
            seed=None if options.seed == -1 else options.seed,
        ),
        fields={**gen_request.fields, **_FIELDS},
        pixel_limits=limits_of(options.min_pixels, options.max_pixels),
        stop=StopStrings(strings=as_tuple(options.stop), token_texts=bool(body.logprobs)),
        model_defaults=True,
        auto_truncate=body.truncate is not False,
    )


def _grammar(format_: str | Json | None) -> Grammar | None:
    if isinstance(format_, dict):
        return schema_grammar(GrammarKind.JSON_SCHEMA, format_)
    return Grammar(kind=GrammarKind.JSON_OBJECT) if format_ else None


def _images(turns: Sequence[OllamaTurn]) -> tuple[MediumSource, ...]:
    """The images of all messages, in order."""
    return tuple(
        MediumSource(image, f"messages[{index}].images[{i}]")
        for index, turn in enumerate(turns)
        for i, image in enumerate(turn.images or ())
    )


def _conversation(turns: Sequence[OllamaTurn]) -> tuple[ChatMessage, ...]:
    before, messages = 0, list[ChatMessage]()
    for index, turn in enumerate(turns):
        messages.append(_message(turn, f"messages[{index}]", before))
        before += len(turn.images or ())
    return tuple(messages)


def _parts(count: int, before: int, text: str) -> tuple[MessagePart, ...]:
    """A message with so many images after `before` others: they come before its text."""
    if not count:
        return ()
    shown = tuple(MessagePart(medium=before + index) for index in range(count))
    return (*shown, MessagePart(text=text)) if text else shown


def _message(turn: OllamaTurn, at: str, images_before: int) -> ChatMessage:
    if turn.images and turn.role not in ("user", "tool"):
        raise Unsupported.at(f"{at}.images", f"not supported in messages of the role {turn.role}")
    if turn.content is None and turn.role != "assistant":
        raise InvalidRequest("a message requires content", param=f"{at}.content")
    return ChatMessage(
        role=turn.role,
        content=turn.content or "",
        name=turn.tool_name,
        reasoning_content=turn.thinking or None,
        tool_calls=tuple(
            MessageToolCall(
                id=call.id or "",
                name=call.function.name,
                arguments=msgspec.json.encode(call.function.arguments or {}).decode(),
            )
            for call in turn.tool_calls or ()
        ),
        tool_call_id=turn.tool_call_id,
        without_content=turn.content is None,
        parts=_parts(len(turn.images or ()), images_before, turn.content or ""),
    )
