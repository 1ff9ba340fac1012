"""Bodies of /api/chat and /api/generate, written as those of the OpenAI family and read as such."""

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
    Json,
    JsonSchemaFormat,
    ResponseFormat,
    ToolCall,
)
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Read a conversation; None: it has no messages, and asks only whether the model is there.

    Raises:
        InvalidRequest: Names the field at fault.
    """
    if not body.messages:
        return _is_load_request(body, served)
    last = body.messages[-1]
    asked = ChatBody(
        messages=[_turn(turn, f"messages[{index}]") for index, turn in enumerate(body.messages)],
        tools=body.tools,
        continue_final_message=last.role == "assistant"
        and bool(last.content)
        and not last.tool_calls,
    )
    return _chat("ollama_chat", body, asked, formats, served)


def parse_generate(
    body: OllamaGenerateBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOpenAiRequest | None:
    """Read a prompt; None: it is empty, and asks only whether the model is there.

    Raises:
        InvalidRequest: Names the field at fault.
    """
    if not body.prompt and not body.suffix:
        return _is_load_request(body, served)
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return _raw(body, prompt, served)
    turns = [ChatMessageParam(role="system", content=body.system)] if body.system else []
    asked = ChatBody(messages=[*turns, ChatMessageParam(role="user", content=prompt)])
    return _chat("ollama_generate", body, asked, formats, served)


def tagged(name: str) -> str:
    """A model's name with its tag, which is `latest` unless said."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def model_of(name: str | None, served: Sequence[ModelName]) -> str | None:
    """The model that is meant; None: the one that is served."""
    if name and tagged(name) in map(tagged, served):
        return None
    return openai.model_of(name)


def _is_load_request(body: OllamaBody, served: Sequence[ModelName]) -> None:
    if model_of(body.model, served) is None and _unloads(body.keep_alive):
        text = "keep_alive: the model stays loaded as long as it is served"
        raise Unsupported(text, param="keep_alive")


def _unloads(keep_alive: str | float | None) -> bool:
    """Whether the model shall go at once."""
    if isinstance(keep_alive, str):
        return not keep_alive.strip("0.hmnuµs") and "0" in keep_alive
    return keep_alive == 0


def _chat(
    door: str, body: OllamaBody, asked: ChatBody, formats: Formats, served: Sequence[ModelName]
) -> ParsedOpenAiRequest:
    if body.think and formats.reasoning is None:
        text = (
            "think: it is not known how this model marks its thinking: set gateway.reasoning_parser"
        )
        raise Unsupported(text, param="think")
    asked = msgspec.structs.replace(
        asked,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        chat_template_kwargs=_switches(body.think),
    )
    return _with_ollama_names(
        door, body, openai.parse_chat(_with_common_fields(asked, body), formats), served
    )


def _raw(body: OllamaGenerateBody, prompt: str, served: Sequence[ModelName]) -> ParsedOpenAiRequest:
    if body.system:
        raise InvalidRequest(
            "system: a prompt without a template has a place for it, if any", param="system"
        )
    if body.think:
        raise InvalidRequest(
            "think: a prompt without a template says so itself, if at all", param="think"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    asked = CompletionBody(
        prompt=prompt,
        suffix=body.suffix,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _with_ollama_names(
        "ollama_generate", body, openai.parse_completion(_with_common_fields(asked, body)), served
    )


def _with_common_fields(asked: B, body: OllamaBody) -> B:
    """Add what both kinds of body say in the same way."""
    options = body.options or OllamaOptions()
    _check(options)
    top_k = options.top_k
    return msgspec.structs.replace(
        asked,
        temperature=options.temperature,
        top_k=-1 if top_k is not None and top_k <= 0 else top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
        response_format=_form(body.format),
        stream=body.stream is not False,
    )


def _check(options: OllamaOptions) -> None:
    for name, why in refused.OPTIONS.items():
        value: object = getattr(options, name)
        if value is not None and value not in why.neutral:
            raise Unsupported(f"options.{name}: {why.reason}", param=f"options.{name}")


def _form(said: str | Json | None) -> ResponseFormat | None:
    if isinstance(said, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=said))
    return ResponseFormat(type="json_object") if said else None


def _switches(think: bool | str | None) -> Json | None:
    """What chat templates call the switch of their thinking, each in its own way."""
    if think is None:
        return None
    on = msgspec.Raw(msgspec.json.encode(bool(think)))
    return {"enable_thinking": on, "thinking": on}


def _with_ollama_names(
    door: str, body: OllamaBody, parsed: ParsedOpenAiRequest, served: Sequence[ModelName]
) -> ParsedOpenAiRequest:
    """Name things as Ollama does; a limit over what the context leaves is none."""
    (gen_request,) = parsed.gen_requests
    limit = None if body.options is None else body.options.num_predict
    gen_request = msgspec.structs.replace(
        gen_request,
        door=door,
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
        raise Unsupported(f"{at}.images: this model reads text only", param=f"{at}.images")
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
