"""Bodies of messages, checked into asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.anthropic.content_blocks import ThinkingDisplay
from antiphon.gateway.http.anthropic.conversation import continues_last_turn, conversation
from antiphon.gateway.http.anthropic.schema import (
    ContextManagement,
    OutputConfig,
    ThinkingBody,
)
from antiphon.gateway.http.core.output_parser import OutputParserOptions
from antiphon.gateway.http.core.structured_output import single_grammar
from antiphon.gateway.http.core.tool_calls import (
    template_tools,
    to_json,
    tool_plan,
    with_tool_constraints,
)
from antiphon.gateway.http.openai.parse import model_of
from antiphon.gateway.parsing.formats import NO_FORMATS, Formats
from antiphon.gateway.parsing.tools.choice import Mode, ToolChoice, not_offered
from antiphon.gateway.parsing.tools.tool import read_tools
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    ReasoningParams,
    SamplingOptions,
)
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.grammar import Grammar, GrammarKind
from antiphon.wire.sampling import StopStrings
from antiphon.wire.tokenize import TemplateParams

if TYPE_CHECKING:
    from antiphon.gateway.http.anthropic.schema import (
        MessagesBody,
        OutputFormat,
        PromptBody,
        ToolBody,
    )
    from antiphon.gateway.http.core.structured_output import RequestedGrammar
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.choice import ToolPlan
    from antiphon.gateway.parsing.tools.tool import Tool
    from antiphon.wire.schemas import Json

_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the setting that turns thinking on and off."""


class MessagesResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is told.

    Attributes:
        tokens_max: How long it may get for all the client cares.
        hearing: How it is taken apart.
        display: What is told of its thinking.
    """

    tokens_max: int
    parser_options: OutputParserOptions
    display: ThinkingDisplay


class ParsedMessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was read: the request in it, and how its answer is told.

    Attributes:
        budget: After how many tokens the thinking is ended; None: never.
        warnings: What of the body is ignored.
    """

    gen_request: GenerationRequest
    stream: bool
    reply_options: MessagesResponseOptions
    budget: int | None
    warnings: list[str]


def parse_messages(body: MessagesBody, formats: Formats = NO_FORMATS) -> ParsedMessagesRequest:
    """Read the body of a message.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    # First: what goes on from a thread brings only what is new, and that by itself is malformed.
    warnings = ignored_field_warnings(body)
    plan, form = _plan(body, formats), _form(body)
    gen_request = msgspec.structs.replace(
        _prompt(body, plan, formats.reasoning, door="messages"),
        # No limit, and this in place of one: what the context leaves is enough.
        tokens_default=body.max_tokens,
        sampling=SamplingOptions(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            grammar=form.grammar if form else None,
        ),
        grammar_field=form.field if form else "output_config.format",
        stop=StopStrings(strings=tuple(body.stop_sequences or ())),
    )
    parser_options = OutputParserOptions(
        plan=plan,
        reasoning=formats.reasoning,
        calls_before=sum(len(turn.tool_calls) for turn in gen_request.messages or ()),
    )
    return ParsedMessagesRequest(
        gen_request=with_tool_constraints(gen_request, plan, formats.reasoning),
        stream=bool(body.stream),
        reply_options=MessagesResponseOptions(
            tokens_max=body.max_tokens,
            parser_options=parser_options,
            display=_display(body.thinking),
        ),
        budget=_budget(body.thinking, body.max_tokens),
        warnings=warnings,
    )


def parse_count(body: PromptBody, formats: Formats = NO_FORMATS) -> GenerationRequest:
    """Read what is counted.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    return _prompt(body, _plan(body, formats), formats.reasoning, door="count_tokens")


def _prompt(
    body: PromptBody, plan: ToolPlan, reasoning: ReasoningFormat | None, *, door: str
) -> GenerationRequest:
    at = f"messages[{len(body.messages) - 1}].content"
    turns, continued = continues_last_turn(conversation(body), at)
    switched = _switched(body.thinking, reasoning)
    return GenerationRequest(
        door=door,
        model=model_of(body.model),
        messages=turns,
        continue_final_message=continued,
        template=TemplateParams(options=_options(body, switched), tools=template_tools(plan)),
        thinking=None
        if reasoning is None
        else ReasoningParams(format=reasoning, switched=switched),
        model_defaults=True,
    )


def ignored_field_warnings(body: PromptBody) -> list[str]:
    """Warnings of fields of Anthropic's betas that change nothing here.

    Raises:
        InvalidRequest: The conversation goes on from one that would have to be held here.
        Unsupported: It is to be summarised.
    """
    if body.thread is not None and body.thread.type == "continue":
        raise InvalidRequest(
            "conversations are not held here: send all of the messages",
            param="thread.previous_message_id",
            details={"error_code": "thread_not_found"},
        )
    edits = (body.context_management or ContextManagement()).edits or []
    for index, edit in enumerate(edits):
        kind = to_json(edit.get("type"), f"context_management.edits[{index}].type")
        if not isinstance(kind, str) or not kind.startswith("clear_"):
            at = f"context_management.edits[{index}].type"
            raise Unsupported("conversations are not summarised here", param=at)
    kept = all(to_json(edit.get("keep"), "context_management") == "all" for edit in edits)
    return [
        f"{field} is ignored: {why}"
        for field, applies, why in (
            ("thread", body.thread is not None, "nothing is held; send all of the messages"),
            ("context_management", not kept, "the conversation is used as it is sent"),
            ("speed", body.speed == "fast", "there is one speed"),
            ("billing_policy", bool(body.billing_policy), "nothing is billed"),
            ("diagnostics", bool(body.diagnostics), "earlier requests are not kept"),
            ("fallbacks", bool(body.fallbacks), "one model is served"),
            ("fallback_credit_token", bool(body.fallback_credit_token), "one model is served"),
            ("user_profile_id", bool(body.user_profile_id), "it is a label"),
        )
        if applies
    ]


def _options(body: PromptBody, switched: bool | None) -> str | None:
    """The variables of the chat template, as JSON."""
    options: dict[str, object] = {}
    if body.output_config and body.output_config.effort:
        options["reasoning_effort"] = body.output_config.effort
    if switched is not None:
        options |= dict.fromkeys(_SWITCHES, switched)
    return msgspec.json.encode(options).decode() if options else None


def _switched(said: ThinkingBody | None, reasoning: ReasoningFormat | None) -> bool | None:
    """Whether thinking is turned on, or off."""
    if said is None or said.type == "adaptive":
        return None
    if said.type == "between_tools":
        text = "a model thinks at the beginning of its answer, or not at all"
        raise Unsupported(text, param="thinking.type")
    if said.type == "enabled" and reasoning is None:
        text = "it is not known how this model thinks: set gateway.reasoning_parser"
        raise Unsupported(text, param="thinking.type")
    return said.type == "enabled"


def _display(said: ThinkingBody | None) -> ThinkingDisplay:
    if said is None:
        return ThinkingDisplay.WHOLE
    if said.type == "disabled":
        return ThinkingDisplay.HIDDEN  # some models cannot be told
    return ThinkingDisplay.OMITTED if said.display == "omitted" else ThinkingDisplay.WHOLE


def _budget(said: ThinkingBody | None, tokens_max: int) -> int | None:
    if said is None or said.type != "enabled":
        return None
    if said.budget_tokens is None:
        raise InvalidRequest("enabled thinking has a budget", param="thinking.budget_tokens")
    if said.budget_tokens >= tokens_max:
        text = f"{said.budget_tokens} tokens of thinking leave nothing of {tokens_max} max_tokens"
        raise InvalidRequest(text, param="thinking.budget_tokens")
    return said.budget_tokens


def _form(body: PromptBody) -> RequestedGrammar | None:
    config = body.output_config or OutputConfig()
    if config.task_budget:
        raise Unsupported("say max_tokens", param="output_config.task_budget")
    return single_grammar(
        {
            "output_config.format": _grammar(config.format),
            "output_format": _grammar(body.output_format),
        }
    )


def _grammar(given: OutputFormat | None) -> Grammar | None:
    if given is None:
        return None
    schema = msgspec.json.encode(given.schema).decode()
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)


def _plan(body: PromptBody, formats: Formats) -> ToolPlan:
    tools = _tools(body.tools or [])
    said = body.tool_choice
    choice, formed = _choice(body, tools), _form(body)
    form = None if formed is None else formed.grammar
    parallel = not (said and said.disable_parallel_tool_use)
    try:
        return tool_plan(tools, choice, formats.tools, parallel=parallel, form=form)
    except Unsupported as error:
        raise Unsupported(
            _is_supported_tool(error.message), param=_is_supported_tool(error.param or "tools")
        ) from error


def _choice(body: PromptBody, tools: tuple[Tool, ...]) -> ToolChoice:
    said = body.tool_choice
    if said is None or said.type == "none":
        return ToolChoice(Mode.AUTO if tools and said is None else Mode.NONE)
    if not tools:
        raise InvalidRequest("there are no tools to choose from", param="tool_choice")
    if said.type == "auto":
        return ToolChoice(Mode.AUTO)
    if said.type == "any":
        return ToolChoice(Mode.REQUIRED)
    if all(tool.name != said.name for tool in tools):
        raise InvalidRequest(not_offered(said.name or "", tools), param="tool_choice.name")
    return ToolChoice(Mode.REQUIRED, said.name)


def _tools(said: list[ToolBody]) -> tuple[Tool, ...]:
    written = [_function(tool, f"tools[{index}]") for index, tool in enumerate(said)]
    try:
        return read_tools(written)
    except InvalidRequest as error:
        # They were read in the form that chat templates show; these clients have another.
        raise InvalidRequest(
            _is_supported_tool(error.message), param=_is_supported_tool(error.param or "tools")
        ) from error


def _is_supported_tool(text: str) -> str:
    return text.replace(".function.parameters", ".input_schema").replace(".function", "")


def _function(tool: ToolBody, at: str) -> Json:
    """A tool as chat templates read it."""
    if tool.type not in (None, "custom"):
        text = f"'{tool.type}' is a tool of Anthropic's; only custom ones are served"
        raise Unsupported(text, param=f"{at}.type")
    if tool.defer_loading:
        raise Unsupported("there is no search for tools", param=f"{at}.defer_loading")
    if set(tool.allowed_callers or ()) - {"direct"}:
        raise Unsupported("only `direct` is served", param=f"{at}.allowed_callers")
    if tool.input_schema is None:
        raise InvalidRequest("a tool needs a schema", param=f"{at}.input_schema")
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
