"""Shared by the chat APIs: which tools the model sees, and the resulting output constraint."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.parsing.tools.choice import Mode, plan_tools
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.choice import ToolChoice, ToolPlan
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.gateway.parsing.tools.tool import Tool
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.grammar import Grammar
    from antiphon.wire.schemas import Json


def to_json(value: object, field: str) -> Json:
    """Decode raw JSON to Python values.

    Raises:
        InvalidRequest: It has values that cannot be decoded, such as a number out of range.
    """
    return cast("Json", decode(msgspec.json.encode(value), object, field))


def tool_plan(
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    format_: ToolFormat | None,
    *,
    parallel: bool,
    constraint: Grammar | None,
    requires_strict: bool = True,
) -> ToolPlan:
    """Plan the tools of a request.

    Args:
        tools: Tools of the request.
        choice: Its tool choice.
        format_: The model's tool call format; None if unknown.
        parallel: Whether several calls are allowed.
        constraint: Output constraint of text. Ignored if a tool call is required, as at OpenAI.
        requires_strict: Whether strict tools must be enforced, or only where possible.

    Raises:
        Unsupported: The tool call format is unknown and calls are optional, or no grammar can
            enforce the schemas of strict tools.
    """
    if choice.mode is Mode.AUTO and tools and format_ is None:
        text = (
            "tools: the tool call format of this model is unknown; set "
            "gateway.tool_call_parser (--tool-call-parser)"
        )
        raise Unsupported(text, param="tools")
    return plan_tools(
        tools,
        choice,
        format_,
        parallel=parallel,
        requires_strict=requires_strict,
        constraint=constraint,
    )


def template_tools(plan: ToolPlan) -> str | None:
    """Return the tools in the format of the chat template."""
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
    sampling, field = gen_request.sampling, gen_request.grammar_field
    if plan.grammar is not None and sampling.grammar is None:
        field = "tools"
    if plan.grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
    special = bool((plan.format and plan.format.special) or (format_ and format_.special))
    stop = msgspec.structs.replace(
        gen_request.stop, skip_special_tokens=gen_request.stop.skip_special_tokens and not special
    )
    thinking = gen_request.reasoning
    if thinking is not None and plan.format is not None:
        thinking = msgspec.structs.replace(thinking, call_marks=plan.format.marks)
    return msgspec.structs.replace(
        gen_request, sampling=sampling, grammar_field=field, stop=stop, reasoning=thinking
    )
