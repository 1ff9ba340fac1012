"""What the chats of every family come to: which tools are shown, and what an answer is held to."""

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
    """JSON that was left as it came, as values.

    Raises:
        InvalidRequest: It holds what nobody can read, as a number beyond all bounds.
    """
    return cast("Json", decode(msgspec.json.encode(value), object, field))


def tool_plan(
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    format_: ToolFormat | None,
    *,
    parallel: bool,
    form: Grammar | None,
    insists: bool = True,
) -> ToolPlan:
    """What the tools of a request come to.

    Args:
        tools: Those of the request.
        choice: What it says of them.
        format_: How this model writes calls; None: it is not known.
        parallel: Whether there may be several calls in an answer.
        form: The form of an answer that is no call. An answer that has to be a call has none: the
            call wins, as at OpenAI.
        insists: Whether strict tools have to be held; or are where that can be done.

    Raises:
        Unsupported: The model may call as it likes, and nobody knows how it would, or no grammar
            can hold it to the schemas of strict tools.
    """
    if choice.mode is Mode.AUTO and tools and format_ is None:
        text = "tools: it is not known how this model calls them: set gateway.tool_call_parser"
        raise Unsupported(text, param="tools")
    return plan_tools(tools, choice, format_, parallel=parallel, insists=insists, form=form)


def template_tools(plan: ToolPlan) -> str | None:
    """The tools as the chat template reads them."""
    tools = [tool.written for tool in plan.tools]
    return msgspec.json.encode(tools).decode() if tools else None


def with_tool_constraints(
    gen_request: GenerationRequest, plan: ToolPlan, reasoning: ReasoningFormat | None
) -> GenerationRequest:
    """Hold the answer to what was planned, and let the marks of calls be seen."""
    sampling, field = gen_request.sampling, gen_request.grammar_field
    if plan.grammar is not None and sampling.grammar is None:
        field = "tools"
    if plan.grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
    special = bool((plan.format and plan.format.special) or (reasoning and reasoning.special))
    stop = msgspec.structs.replace(
        gen_request.stop, skip_special_tokens=gen_request.stop.skip_special_tokens and not special
    )
    thinking = gen_request.thinking
    if thinking is not None and plan.format is not None:
        thinking = msgspec.structs.replace(thinking, call_marks=plan.format.marks)
    return msgspec.structs.replace(
        gen_request, sampling=sampling, grammar_field=field, stop=stop, thinking=thinking
    )
