"""Parses bodies of messages into requests, and their messages into turns of chat templates."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.gateway.http.anthropic.schema import (
    Block,
    ContextManagement,
    ImageBlock,
    ImageSource,
    MessageParam,
    MessagesBody,
    OutputConfig,
    PromptBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingBody,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
    Unread,
)
from antiphon.gateway.http.core.chat import (
    FORMAT_UNKNOWN,
    OutputParserOptions,
    renamed_fields,
    template_options,
    template_tools,
    to_json,
    with_tool_constraints,
)
from antiphon.gateway.http.core.fields import decode, model_of
from antiphon.gateway.http.core.image_options import pixel_limits
from antiphon.gateway.http.core.sampling_fields import schema_grammar, single_grammar
from antiphon.gateway.parsing.tools.choice import (
    Mode,
    ToolChoice,
    ToolPlan,
    not_offered,
    plan_tools,
)
from antiphon.gateway.parsing.tools.tool import Tool, read_tools
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    ReasoningParams,
    SamplingOptions,
    media_fields,
)
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import Grammar, GrammarKind, StopStrings
from antiphon.wire.tokenize import ChatMessage, MessagePart, MessageToolCall, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.parsing.reasoning import ReasoningFormat
    from antiphon.wire.schemas import Json

_BETWEEN = "\n"
"""Separates the texts of blocks that are joined."""


class ThinkingDisplay(Enum):
    WHOLE = "whole"
    OMITTED = "omitted"
    """A block without text, with its signature."""
    HIDDEN = "hidden"


class ParsedMessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    gen_request: GenerationRequest
    stream: bool
    tokens_max: int
    """The client's limit."""
    parser_options: OutputParserOptions
    display: ThinkingDisplay
    budget: int | None
    """Reasoning tokens; None without a limit."""
    warnings: list[str]
    """About ignored parts of the body."""


def parse_messages(body: MessagesBody, formats: Formats) -> ParsedMessagesRequest:
    # Checked first: a request that continues a thread has only new messages, which alone are
    # invalid.
    warnings = ignored_field_warnings(body)
    plan, (field, grammar) = _plan(body, formats), _output_constraint(body)
    prompt = _prompt(body, plan, formats.reasoning, api="messages")
    gen_request = msgspec.structs.replace(
        prompt,
        # Not a hard limit: a context that leaves less is accepted.
        tokens_default=body.max_tokens,
        sampling=SamplingOptions(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, grammar=grammar
        ),
        fields={**prompt.fields, "grammar": field},
        stop=StopStrings(strings=tuple(body.stop_sequences or ())),
    )
    return ParsedMessagesRequest(
        gen_request=with_tool_constraints(gen_request, plan, formats.reasoning),
        stream=bool(body.stream),
        tokens_max=body.max_tokens,
        parser_options=OutputParserOptions(
            plan=plan,
            reasoning=formats.reasoning,
            calls_before=sum(len(turn.tool_calls) for turn in gen_request.messages or ()),
        ),
        display=_display(body.thinking),
        budget=_budget(body.thinking, body.max_tokens),
        warnings=warnings,
    )


def parse_count(body: PromptBody, formats: Formats) -> GenerationRequest:
    return _prompt(body, _plan(body, formats), formats.reasoning, api="count_tokens")


def _prompt(
    body: PromptBody, plan: ToolPlan, reasoning: ReasoningFormat | None, *, api: str
) -> GenerationRequest:
    at = f"messages[{len(body.messages) - 1}].content"
    images: list[MediumSource] = []
    turns, continued = continues_last_turn(conversation(body, images), at)
    enabled = _reasoning_enabled(body.thinking, reasoning)
    return GenerationRequest(
        api=api,
        model=model_of(body.model),
        messages=turns,
        continue_final_message=continued,
        template=TemplateParams(
            options=template_options(enabled, body.output_config and body.output_config.effort),
            tools=template_tools(plan),
        ),
        reasoning=None if reasoning is None else ReasoningParams(format=reasoning, enabled=enabled),
        model_defaults=True,
        media=tuple(images),
        pixel_limits=pixel_limits(body.mm_processor_kwargs),
        fields=media_fields(images),
    )


def ignored_field_warnings(body: PromptBody) -> list[str]:
    """Return warnings about ignored beta fields; reject those that would change the result."""
    if body.thread is not None and body.thread.type == "continue":
        raise InvalidRequest(
            "conversations are not stored; send all messages",
            param="thread.previous_message_id",
            details={"error_code": "thread_not_found"},
        )
    edits = (body.context_management or ContextManagement()).edits or []
    for index, edit in enumerate(edits):
        kind = to_json(edit.get("type"), f"context_management.edits[{index}].type")
        if not isinstance(kind, str) or not kind.startswith("clear_"):
            at = f"context_management.edits[{index}].type"
            raise Unsupported("compaction of conversations is not supported", param=at)
    keeps_all = all(to_json(edit.get("keep"), "context_management") == "all" for edit in edits)
    return [
        f"{field} is ignored: {why}"
        for field, applies, why in (
            ("thread", body.thread is not None, "conversations are not stored; send all messages"),
            ("context_management", not keeps_all, "the conversation is used as it is sent"),
            ("speed", body.speed == "fast", "there is one speed"),
            ("billing_policy", bool(body.billing_policy), "nothing is billed"),
            ("diagnostics", bool(body.diagnostics), "earlier requests are not stored"),
            ("fallbacks", bool(body.fallbacks), "one model is served"),
            ("fallback_credit_token", bool(body.fallback_credit_token), "one model is served"),
            ("user_profile_id", bool(body.user_profile_id), "it has no effect"),
        )
        if applies
    ]


def _reasoning_enabled(
    thinking: ThinkingBody | None, reasoning: ReasoningFormat | None
) -> bool | None:
    if thinking is None or thinking.type == "adaptive":
        return None
    if thinking.type == "between_tools":
        text = "thinking cannot be enabled when the final assistant message is continued"
        raise Unsupported(text, param="thinking.type")
    if thinking.type == "enabled" and reasoning is None:
        raise Unsupported(FORMAT_UNKNOWN, param="thinking.type")
    return thinking.type == "enabled"


def _display(thinking: ThinkingBody | None) -> ThinkingDisplay:
    if thinking is None:
        return ThinkingDisplay.WHOLE
    if thinking.type == "disabled":
        return ThinkingDisplay.HIDDEN  # some models have no switch
    return ThinkingDisplay.OMITTED if thinking.display == "omitted" else ThinkingDisplay.WHOLE


def _budget(thinking: ThinkingBody | None, tokens_max: int) -> int | None:
    if thinking is None or thinking.type != "enabled":
        return None
    if thinking.budget_tokens is None:
        raise InvalidRequest(
            "budget_tokens is required when thinking is enabled", param="thinking.budget_tokens"
        )
    if thinking.budget_tokens >= tokens_max:
        text = (
            f"budget_tokens ({thinking.budget_tokens}) must be less than max_tokens ({tokens_max})"
        )
        raise InvalidRequest(text, param="thinking.budget_tokens")
    return thinking.budget_tokens


def _output_constraint(body: PromptBody) -> tuple[str, Grammar | None]:
    config = body.output_config or OutputConfig()
    if config.task_budget:
        raise Unsupported("use max_tokens", param="output_config.task_budget")
    return single_grammar(
        {
            field: schema_grammar(GrammarKind.JSON_SCHEMA, given and given.schema)
            for field, given in (
                ("output_config.format", config.format),
                ("output_format", body.output_format),
            )
        }
    )


def _plan(body: PromptBody, formats: Formats) -> ToolPlan:
    written = [_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    with renamed_fields(_anthropic_path):
        tools = read_tools(written)
    tool_choice = body.tool_choice
    choice, (_, constraint) = _choice(body, tools), _output_constraint(body)
    parallel = not (tool_choice and tool_choice.disable_parallel_tool_use)
    with renamed_fields(_anthropic_path):
        return plan_tools(tools, choice, formats.tools, parallel=parallel, constraint=constraint)


def _choice(body: PromptBody, tools: tuple[Tool, ...]) -> ToolChoice:
    tool_choice = body.tool_choice
    if tool_choice is None or tool_choice.type == "none":
        return ToolChoice(Mode.AUTO if tools and tool_choice is None else Mode.NONE)
    if not tools:
        raise InvalidRequest("tools are required", param="tool_choice")
    if tool_choice.type == "auto":
        return ToolChoice(Mode.AUTO)
    if tool_choice.type == "any":
        return ToolChoice(Mode.REQUIRED)
    if all(tool.name != tool_choice.name for tool in tools):
        raise InvalidRequest(not_offered(tool_choice.name or "", tools), param="tool_choice.name")
    return ToolChoice(Mode.REQUIRED, tool_choice.name)


def _anthropic_path(text: str) -> str:
    """Rename the fields of tools, which are parsed in the format of chat templates."""
    return text.replace(".function.parameters", ".input_schema").replace(".function", "")


def _function(tool: ToolBody, at: str) -> Json:
    if tool.type not in (None, "custom"):
        text = f"'{tool.type}' is a server tool of Anthropic's; only custom tools are supported"
        raise Unsupported(text, param=f"{at}.type")
    if tool.defer_loading:
        raise Unsupported("tool search is not supported", param=f"{at}.defer_loading")
    if set(tool.allowed_callers or ()) - {"direct"}:
        raise Unsupported("only `direct` is supported", param=f"{at}.allowed_callers")
    if tool.input_schema is None:
        raise InvalidRequest("input_schema is required", param=f"{at}.input_schema")
    function: dict[str, Json] = {
        "name": tool.name,
        "parameters": to_json(tool.input_schema, f"{at}.input_schema"),
        "strict": bool(tool.strict),
    }
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_examples:
        function["input_examples"] = to_json(tool.input_examples, f"{at}.input_examples")
    return {"type": "function", "function": function}


def conversation(body: PromptBody, images: list[MediumSource]) -> tuple[ChatMessage, ...]:
    """Convert the system prompt and the messages. Consecutive messages of one role are merged.

    `images` gets those of all messages.
    """
    turns: list[ChatMessage] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text(body.system, "system")
        turns.append(ChatMessage(role="system", content=system))
    calls: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}].content", calls, images):
            _add(turns, turn)
    return tuple(turns)


def continues_last_turn(
    turns: Sequence[ChatMessage], at: str
) -> tuple[tuple[ChatMessage, ...], bool]:
    """Return whether the last turn is to be continued; an empty one is dropped.

    `at` is the path of the last message, for errors.
    """
    last = turns[-1]
    if last.role != "assistant":
        return tuple(turns), False
    if last.tool_calls:
        raise InvalidRequest("a tool_use requires its tool_result in a later message", param=at)
    if last.content != last.content.rstrip():
        text = "the final assistant message must not end in white space"
        raise InvalidRequest(text, param=at)
    if last.content:
        return tuple(turns), True
    if last.reasoning_content:
        raise InvalidRequest("a message with only thinking cannot be continued", param=at)
    if len(turns) == 1:
        raise InvalidRequest("the conversation is empty", param=at)
    return tuple(turns[:-1]), False


def _add(turns: list[ChatMessage], turn: ChatMessage) -> None:
    if turns and turn.role == turns[-1].role and turn.role in ("user", "assistant"):
        turns[-1] = _merge(turns[-1], turn)
    else:
        turns.append(turn)


def _turns(
    message: MessageParam, at: str, calls: dict[str, str], images: list[MediumSource]
) -> list[ChatMessage]:
    """Convert a message; `calls` has the names of earlier tool calls by id."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role == "assistant":
        turn = _assistant_turn(message.content, at)
        calls.update((call.id, call.name) for call in turn.tool_calls)
        return [turn]
    if not message.content:
        raise InvalidRequest("a message requires content", param=at)
    if message.role == "system":
        return [ChatMessage(role="system", content=_text(message.content, at))]
    return _user_turns(message.content, at, calls, images)


def _assistant_turn(blocks: Sequence[Block], at: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                calls.append(_call(block, f"{at}[{index}]"))
            case _:
                _misplaced(block, "assistant", f"{at}[{index}]")
    return ChatMessage(
        role="assistant",
        content=_BETWEEN.join(texts),
        reasoning_content=_BETWEEN.join(thoughts) or None,
        tool_calls=tuple(calls),
        without_content=not texts,
    )


def _user_turns(
    blocks: Sequence[Block], at: str, calls: dict[str, str], images: list[MediumSource]
) -> list[ChatMessage]:
    """Convert a user message: texts, images and tool results become one turn each, in order."""
    turns: list[ChatMessage] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        match block:
            case TextBlock(text):
                turns.append(ChatMessage(role="user", content=text))
            case ToolResultBlock():
                turns.append(_result(block, where, calls))
            case ImageBlock(source):
                part = MessagePart(medium=len(images))
                images.append(
                    MediumSource(_image_url(source, f"{where}.source"), f"{where}.source")
                )
                turns.append(ChatMessage(role="user", content="", parts=(part,)))
            case _:
                _misplaced(block, "user", where)
    return turns


def _image_url(source: ImageSource, at: str) -> str:
    found = source.data if source.type == "base64" else source.url
    if not found:
        field = "data" if source.type == "base64" else "url"
        raise InvalidRequest(f"a source of type {source.type} requires {field}", param=at)
    if source.type == "url" and not found.startswith(("http://", "https://", "data:", "file:")):
        raise InvalidRequest("only http, https, data and file URLs are fetched", param=at)
    return found


def _call(block: ToolUseBlock, at: str) -> MessageToolCall:
    arguments = msgspec.json.encode(block.input)
    decode(arguments, object, f"{at}.input")
    return MessageToolCall(id=block.id, name=block.name, arguments=arguments.decode())


def _result(block: ToolResultBlock, at: str, calls: dict[str, str]) -> ChatMessage:
    if block.tool_use_id not in calls:
        text = f"no earlier tool_use has the id '{block.tool_use_id}'"
        raise InvalidRequest(text, param=f"{at}.tool_use_id")
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content, f"{at}.content")
    return ChatMessage(
        role="tool",
        content=f"Error: {text}" if block.is_error else text,
        name=calls[block.tool_use_id],
        tool_call_id=block.tool_use_id,
    )


def _text(blocks: Iterable[Block], at: str) -> str:
    """Return the text of blocks of which only text is allowed."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            _misplaced(block, "", f"{at}[{index}]")
        texts.append(block.text)
    return _BETWEEN.join(texts)


def _misplaced(block: Block, role: str, at: str) -> NoReturn:
    kind = str(type(block).__struct_config__.tag)
    if isinstance(block, Unread):
        raise Unsupported(f"content of type '{kind}' is not supported", param=f"{at}.type")
    where = f"in a message of role {role}" if role else "here"
    raise InvalidRequest(f"{kind} is not allowed {where}", param=f"{at}.type")


def _merge(first: ChatMessage, second: ChatMessage) -> ChatMessage:

    def both(one: str | None, other: str | None) -> str:
        return _BETWEEN.join(text for text in (one, other) if text)

    return ChatMessage(
        role=first.role,
        content=both(first.content, second.content),
        reasoning_content=both(first.reasoning_content, second.reasoning_content) or None,
        tool_calls=first.tool_calls + second.tool_calls,
        without_content=first.without_content and second.without_content,
        parts=_merge_parts(first, second) if first.parts or second.parts else (),
    )


def _merge_parts(first: ChatMessage, second: ChatMessage) -> tuple[MessagePart, ...]:
    """Parts of both; neighbouring texts become one, as in a message without images."""
    before, after = (
        each.parts or ((MessagePart(text=each.content),) if each.content else ())
        for each in (first, second)
    )
    if before and after and before[-1].text is not None and after[0].text is not None:
        text = before[-1].text + _BETWEEN + after[0].text
        return (*before[:-1], MessagePart(text=text), *after[1:])
    return before + after
