"""Parses bodies of chat and text completions into requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.gateway.http.core.chat import (
    OutputParserOptions,
    ParsedPrompts,
    template_tools,
    to_json,
    with_tool_constraints,
)
from antiphon.gateway.http.core.fields import model_of
from antiphon.gateway.http.core.image_options import pixel_limits
from antiphon.gateway.http.core.meta_info import GenerateResponseOptions
from antiphon.gateway.http.core.sampling_fields import processor_of, schema_grammar, single_grammar
from antiphon.gateway.http.openai.schema import (
    COMPLETION_TOKENS,
    PROMPTS_MAX,
    ChatBody,
    CompletionBody,
    CompletionFields,
    ResponseFormat,
    StreamOptions,
    begins_answer,
    conversation,
    images,
)
from antiphon.gateway.parsing.formats import NO_FORMATS, Formats
from antiphon.gateway.parsing.tools.choice import ToolPlan, plan_tools, read_choice
from antiphon.gateway.parsing.tools.tool import read_tools
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    ReasoningParams,
    media_fields,
    set_fields,
)
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import ClientKey
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.sampling import Grammar, GrammarKind, TokenOutputParams
from antiphon.wire.tokenize import TemplateParams

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.wire.schemas import Json

TEXT_FIELDS = {
    "processors": "custom_params",
    "details.ids": "return_token_ids",
    "details.logprobs": "logprobs",
    "details.top": "logprobs",
    "details.named_ids": "logprobs",
    "details.hidden": "return_hidden_states",
}
CHAT_FIELDS = TEXT_FIELDS | {"details.top": "top_logprobs", "prompt": "input_ids"}


class ParsedOpenAiRequest(ParsedPrompts, frozen=True, kw_only=True):
    reply_options: OpenAiResponseOptions


def parse_chat(
    body: ChatBody, formats: Formats = NO_FORMATS, *, requires_strict: bool = True
) -> ParsedOpenAiRequest:
    """Parse the body of a chat completion.

    With `requires_strict`, strict tools are enforced or rejected; else enforced where possible.
    """
    completing = body.max_completion_tokens is not None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
    reply_options = response_options(
        body,
        logprobs=bool(body.logprobs),
        top=body.top_logprobs or 0,
        prompt_ids=body.return_prompt_token_ids or body.return_token_ids,
    )
    wanted = _token_outputs_wanted(body, reply_options)
    plan = _plan(body, formats.tools, requires_strict=requires_strict)
    messages = conversation(body.messages)
    media = images(body.messages)
    gen_request = GenerationRequest(
        api="chat",
        model=model_of(body.model),
        messages=None if body.input_ids else messages,
        prompt_ids=tuple(body.input_ids) if body.input_ids else None,
        continue_final_message=bool(body.continue_final_message) or begins_answer(body.messages),
        template=TemplateParams(options=_options(body), tools=template_tools(plan)),
        reasoning=_reasoning_params(body, formats.reasoning),
        tokens_max=body.max_completion_tokens if completing else body.max_tokens,
        model_defaults=True,
        media=media,
        pixel_limits=pixel_limits(body.mm_processor_kwargs),
        fields=CHAT_FIELDS
        | ({"max_tokens": "max_completion_tokens"} if completing else {})
        | media_fields(media),
    )
    parser_options = OutputParserOptions(
        plan=plan,
        reasoning=None if body.separate_reasoning is False else formats.reasoning,
        stream_reasoning=body.stream_reasoning is not False,
        calls_before=sum(len(turn.tool_calls or ()) for turn in body.messages),
    )
    return ParsedOpenAiRequest(
        gen_requests=(
            with_tool_constraints(
                _with_common_fields(gen_request, body, wanted, name=body.rid),
                plan,
                formats.reasoning,
            ),
        ),
        stream=bool(body.stream),
        budget=body.max_thinking_tokens,
        reply_options=msgspec.structs.replace(reply_options, parser_options=parser_options),
    )


def parse_completion(body: CompletionBody) -> ParsedOpenAiRequest:
    choices = _best_of(body)
    reply_options = response_options(
        body,
        logprobs=body.logprobs is not None,
        top=body.logprobs or 0,
        prompt_ids=body.return_token_ids,
    )
    wanted = _token_outputs_wanted(body, reply_options, ranks=choices > (body.n or 1))
    prompts = _prompts(body.prompt)
    suffix = body.suffix or None
    if suffix is not None:
        _check_suffix(body, prompts)
    if body.session_params is not None and (len(prompts), choices) != (1, 1):
        raise InvalidRequest.at("session_params", "only one prompt is allowed")
    if body.session_params is not None and suffix is not None:
        raise InvalidRequest("session_params: cannot be combined with suffix", param="suffix")
    gen_requests = [
        GenerationRequest(
            api="completions",
            model=model_of(body.model),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            suffix=suffix,
            tokens_max=body.max_tokens,
            tokens_default=COMPLETION_TOKENS,
            fields=TEXT_FIELDS,
        )
        for prompt in prompts
    ]
    return ParsedOpenAiRequest(
        gen_requests=tuple(
            _with_common_fields(
                gen_request,
                body,
                wanted,
                name=f"{body.rid}_{index}" if body.rid and len(prompts) > 1 else body.rid,
                choices=choices,
            )
            for index, gen_request in enumerate(gen_requests)
        ),
        stream=bool(body.stream),
        reply_options=reply_options,
    )


def _best_of(body: CompletionBody) -> int:
    shown = body.n or 1
    made = body.best_of or shown
    if made < shown:
        raise InvalidRequest(f"best_of ({made}) must not be less than n", param="best_of")
    if made > shown and body.stream:
        raise InvalidRequest.at("best_of", "must equal n if stream is true")
    return made


def _with_common_fields(
    gen_request: GenerationRequest,
    body: CompletionFields,
    wanted: TokenOutputParams | None,
    *,
    name: str | None,
    choices: int = 0,
) -> GenerationRequest:
    field, grammar = _output_constraint(body)
    ids = next((name for name, wants in _fields_needing_ids(body).items() if wants), None)
    return msgspec.structs.replace(
        gen_request,
        choices=choices or body.n or 1,
        sampling=body.options(
            processors=processor_of(
                body.custom_logit_processor, body.custom_params, field="custom_params"
            ),
            grammar=grammar,
            outputs=wanted,
        ),
        fields={**gen_request.fields, "grammar": field} | ({"details.ids": ids} if ids else {}),
        stop=body.stop_strings(token_texts=wanted is not None and wanted.logprobs),
        priority=body.priority,
        cache_salt=cache_salt(body.cache_salt, body.extra_key),
        key=None if name is None else ClientKey(name),
    )


def _output_constraint(body: CompletionFields) -> tuple[str, Grammar | None]:
    return single_grammar(
        body.grammars() | {"response_format": _response_form(body.response_format)}
    )


def _response_form(given: ResponseFormat | None) -> Grammar | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest(
                "response_format: json_schema is required", param="response_format.json_schema"
            )
        return schema_grammar(GrammarKind.JSON_SCHEMA, given.json_schema.schema)
    if given.format is None and given.structures is None:
        raise InvalidRequest(
            "response_format: format or structures is required", param="response_format.format"
        )
    tag: dict[str, object] = {"format": given.format}
    if given.format is None:  # the older form
        tag = {"structures": given.structures, "triggers": given.triggers or []}
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=msgspec.json.encode(tag).decode())


def _plan(body: ChatBody, format_: ToolFormat | None, *, requires_strict: bool) -> ToolPlan:
    tools = read_tools(cast("list[Json]", to_json(body.tools or [], "tools")))
    _, constraint = _output_constraint(body)
    return plan_tools(
        tools,
        read_choice(to_json(body.tool_choice, "tool_choice"), tools),
        format_,
        parallel=body.parallel_tool_calls is not False,
        constraint=constraint,
        requires_strict=requires_strict,
    )


def _reasoning_params(body: ChatBody, format_: ReasoningFormat | None) -> ReasoningParams | None:
    if format_ is None:
        return None
    switch_value: object = None
    if format_.switch is not None:
        switch_value = to_json(
            (body.chat_template_kwargs or {}).get(format_.switch), "chat_template_kwargs"
        )
    if switch_value is None and body.reasoning_effort == "none":
        switch_value = False
    return ReasoningParams(
        format=format_, enabled=switch_value if isinstance(switch_value, bool) else None
    )


def _options(body: ChatBody) -> str | None:
    options: dict[str, object] = {}
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        options |= {"enable_thinking": False, "thinking": False}
    if body.verbosity is not None:
        options["verbosity"] = body.verbosity
    options |= body.chat_template_kwargs or {}
    return msgspec.json.encode(options).decode() if options else None


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = tuple(item for item in prompt if isinstance(item, int))
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequest.at(
            "prompt", "must be a list of token ids or a list of prompts, not a mix"
        )
    if len(prompt) > PROMPTS_MAX:
        raise InvalidRequest.at("prompt", f"{len(prompt)} prompts; the limit is {PROMPTS_MAX}")
    return [tuple(item) if isinstance(item, list) else str(item) for item in prompt]


def _check_suffix(body: CompletionBody, prompts: list[str | tuple[int, ...]]) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest.at("suffix", "requires text prompts, not token ids")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest.at("echo", "cannot be combined with suffix and logprobs")


class OpenAiResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which fields the client requested. Those of the body have its names.

    `usage_last` asks for a usage chunk at the end, `usage_always` in each chunk. `recorded` is what
    `meta_info` has.
    """

    n: int = 1
    rid: str | None = None
    return_hidden_states: bool = False
    return_token_ids: bool = False
    return_cached_tokens_details: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    echo: bool = False
    logprobs: bool = False
    prompt_ids: bool = False
    usage_last: bool | None = None
    usage_always: bool = False
    recorded: GenerateResponseOptions = GenerateResponseOptions()
    parser_options: OutputParserOptions = OutputParserOptions()

    @property
    def bare(self) -> bool:
        """Whether chunks in the middle of the output have nothing but text."""
        return not (
            self.logprobs or self.usage_always or self.return_hidden_states or self.return_token_ids
        )


def response_options(
    body: CompletionFields, *, logprobs: bool, top: int, prompt_ids: bool | None
) -> OpenAiResponseOptions:
    stream = body.stream_options or StreamOptions()
    options = msgspec.structs.replace(
        OpenAiResponseOptions(), **set_fields(body, OpenAiResponseOptions)
    )
    return msgspec.structs.replace(
        options,
        logprobs=logprobs,
        prompt_ids=bool(prompt_ids),
        usage_last=stream.include_usage,
        usage_always=bool(stream.continuous_usage_stats),
        recorded=GenerateResponseOptions(
            logprobs=logprobs,
            start=0 if options.echo and logprobs else -1,
            top=top,
            texts=True,
            hidden="last" if options.return_hidden_states else "",
        ),
    )


def _token_outputs_wanted(
    body: CompletionFields, options: OpenAiResponseOptions, *, ranks: bool = False
) -> TokenOutputParams | None:
    """Token outputs to request from the engine, if any; `ranks`: to choose the best outputs."""
    logprobs, ids = options.logprobs or ranks, any(_fields_needing_ids(body).values())
    if not (logprobs or ids or options.return_hidden_states):
        return None
    return TokenOutputParams(
        ids=ids,
        logprobs=logprobs,
        top=options.recorded.top,
        hidden=options.return_hidden_states,
        prompt_start=options.recorded.start,
    )


def _fields_needing_ids(body: CompletionFields) -> dict[str, bool | None]:
    return {
        "return_token_ids": body.return_token_ids,
        "return_output_ids_in_sglext": body.return_output_ids_in_sglext,
        "return_meta_info": body.return_meta_info,
        "session_params": isinstance(body, CompletionBody) and body.session_params is not None,
    }
