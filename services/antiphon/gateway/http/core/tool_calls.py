"""Shared by the chat APIs: how the tools of a request change its prompt and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.gateway.http.core.fields import decode

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.choice import ToolPlan
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.schemas import Json


def to_json(value: object, field: str) -> Json:
    """Decode raw JSON, which may have values that cannot be decoded, to Python values."""
    return cast("Json", decode(msgspec.json.encode(value), object, field))


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
