"""Parses bodies of /api/chat and /api/generate by converting them to OpenAI's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.gateway.http.ollama import unsupported as refused
from antiphon.gateway.http.ollama.schema import OllamaOptions
from antiphon.gateway.http.openai import parse as openai
from antiphon.gateway.http.openai.schema import (
    ChatBody,
    ChatMessageParam,
    CompletionBody,
    FunctionCall,
    JsonSchemaFormat,
    ResponseFormat,
    ToolCall,
)
from antiphon.gateway.requests.sampling import SamplingFields, set_fields
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.sampling import Json
    from antiphon.gateway.http.ollama.schema import (
        OllamaBody,
        OllamaCall,
        OllamaChatBody,
        OllamaGenerateBody,
        OllamaTurn,
    )
    from antiphon.gateway.http.openai.parse import ParsedOpenAiRequest
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.wire.ids import ModelName

B = TypeVar("B", ChatBody, CompletionBody)

_LATEST = "latest"


def parse_chat(
    body: OllamaChatBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOpenAiRequest | None:
    """Parse a chat; None if it has no messages and only checks that the model is ready.

    Raises:
        InvalidRequest: Names the invalid field.
    """
    if not body.messages:
        return _is_load_request(body, served)
    last = body.messages[-1]
    chat = ChatBody(
        messages=[_turn(turn, f"messages[{index}]") for index, turn in enumerate(body.messages)],
        tools=body.tools,
        continue_final_message=last.role == "assistant"
        and bool(last.content)
        and not last.tool_calls,
    )
    return _chat("ollama_chat", body, chat, formats, served)


def parse_generate(
    body: OllamaGenerateBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOpenAiRequest | None:
    """Parse a prompt; None if it is empty and only checks that the model is ready.

    Raises:
        InvalidRequest: Names the invalid field.
    """
    if not body.prompt and not body.suffix:
        return _is_load_request(body, served)
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return _raw(body, prompt, served)
    turns = [ChatMessageParam(role="system", content=body.system)] if body.system else []
    chat = ChatBody(messages=[*turns, ChatMessageParam(role="user", content=prompt)])
    return _chat("ollama_generate", body, chat, formats, served)


def tagged(name: str) -> str:
    """Return a model name with its tag, `latest` by default."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def model_of(name: str | None, served: Sequence[ModelName]) -> str | None:
    """Return the requested model; None for the served one."""
    if name and tagged(name) in map(tagged, served):
        return None
    return openai.model_of(name)


def _is_load_request(body: OllamaBody, served: Sequence[ModelName]) -> None:
    if model_of(body.model, served) is None and _unloads(body.keep_alive):
        text = "keep_alive: unloading is not supported; the model stays loaded"
        raise Unsupported(text, param="keep_alive")


def _unloads(keep_alive: str | float | None) -> bool:
    """Whether the model should be unloaded immediately."""
    if isinstance(keep_alive, str):
        return not keep_alive.strip("0.hmnuµs") and "0" in keep_alive
    return keep_alive == 0


def _chat(
    api: str, body: OllamaBody, chat: ChatBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOpenAiRequest:
    if body.think and formats.reasoning is None:
        text = (
            "think: the reasoning format of this model is unknown; set "
            "gateway.reasoning_parser (--reasoning-parser)"
        )
        raise Unsupported(text, param="think")
    chat = msgspec.structs.replace(
        chat,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        chat_template_kwargs=_switches(body.think),
    )
    return _with_ollama_names(
        api, body, openai.parse_chat(_with_common_fields(chat, body), formats), served
    )


def _raw(body: OllamaGenerateBody, prompt: str, served: Sequence[ModelName]) -> ParsedOpenAiRequest:
    if body.system:
        raise InvalidRequest(
            "system: cannot be combined with raw; include it in the prompt", param="system"
        )
    if body.think:
        raise InvalidRequest("think: cannot be combined with raw", param="think")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
    completion = CompletionBody(
        prompt=prompt,
        suffix=body.suffix,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _with_ollama_names(
        "ollama_generate",
        body,
        openai.parse_completion(_with_common_fields(completion, body)),
        served,
    )


def _with_common_fields(converted: B, body: OllamaBody) -> B:
    """Add the fields common to chats and prompts."""
    options = body.options or OllamaOptions()
    _check(options)
    given = set_fields(options, SamplingFields)
    if options.top_k is not None and options.top_k <= 0:
        given["top_k"] = -1
    return msgspec.structs.replace(
        converted,
        **given,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
        response_format=_response_format(body.format),
        stream=body.stream is not False,
    )


def _check(options: OllamaOptions) -> None:
    for name, why in refused.OPTIONS.items():
        value: object = getattr(options, name)
        if value is not None and value not in why.neutral:
            raise Unsupported(f"options.{name}: {why.reason}", param=f"options.{name}")


def _response_format(format_: str | Json | None) -> ResponseFormat | None:
    if isinstance(format_, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=format_))
    return ResponseFormat(type="json_object") if format_ else None


def _switches(think: bool | str | None) -> Json | None:
    """Return the template variables that turn reasoning on and off, whose names vary by model."""
    if think is None:
        return None
    on = msgspec.Raw(msgspec.json.encode(bool(think)))
    return {"enable_thinking": on, "thinking": on}


def _with_ollama_names(
    api: str, body: OllamaBody, parsed: ParsedOpenAiRequest, served: Sequence[ModelName]
) -> ParsedOpenAiRequest:
    """Apply Ollama's field names; a token limit beyond the context is accepted."""
    (gen_request,) = parsed.gen_requests
    limit = None if body.options is None else body.options.num_predict
    gen_request = msgspec.structs.replace(
        gen_request,
        api=api,
        model=model_of(body.model, served),
        tokens_max=None,
        tokens_default=None if limit is None or limit < 0 else limit,
        grammar_field="tools" if gen_request.grammar_field == "tools" else "format",
        model_defaults=True,
        auto_truncate=body.truncate is not False,
    )
    return msgspec.structs.replace(parsed, gen_requests=(gen_request,))


def _turn(turn: OllamaTurn, at: str) -> ChatMessageParam:
    if turn.images:
        raise Unsupported(f"{at}.images: this model accepts text only", param=f"{at}.images")
    return ChatMessageParam(
        role=turn.role,
        content=turn.content,
        name=turn.tool_name,
        reasoning_content=turn.thinking,
        tool_calls=[_call(call) for call in turn.tool_calls or ()],
        tool_call_id=turn.tool_call_id,
    )


def _call(call: OllamaCall) -> ToolCall:
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return ToolCall(
        id=call.id or "", function=FunctionCall(name=call.function.name, arguments=arguments)
    )
