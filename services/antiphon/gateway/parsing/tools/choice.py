"""Resolves `tool_choice`: which tools the model sees, the output constraint, and the parser.

```python
plan = plan_tools(read_tools(body_tools), read_choice(body.tool_choice), format_, parallel=True)
plan.tools       # for the chat template
plan.grammar     # for the request, None: unconstrained; `after_thinking` adds reasoning before it
plan.format      # for the AnswerParser, None: nothing is parsed
plan.offer(...)  # for the AnswerParser
```
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.grammars import (
    calls_list,
    calls_only,
    calls_or,
    calls_or_text,
    calls_within,
)
from antiphon.gateway.parsing.tools.format import ToolFormat
from antiphon.gateway.parsing.tools.json_calls import JSON_CALLS
from antiphon.gateway.parsing.tools.tool import OfferedTools, Tool
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.schemas import Json


_NAMES_SHOWN = 16  # maximum number of tools listed in an error
_FORMAT_UNKNOWN = (
    "the tool call format of this model is unknown; set gateway.tool_call_parser "
    "(--tool-call-parser)"
)


class Mode(Enum):
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call
    NONE = "none"


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether to call tools, and which: with `name` the model must call that tool."""

    mode: Mode
    name: str | None = None


class ToolPlan(msgspec.Struct, frozen=True):
    """The resolved tools of a request."""

    tools: tuple[Tool, ...] = ()  # that the chat template shows
    format: ToolFormat | None = None  # of the output; None if there are no calls
    grammar: Grammar | None = None  # of the output, or of the text after its reasoning
    calls_max: int | None = None

    def offer(self, *, calls_before: int = 0) -> OfferedTools:
        schemas: dict[str, Json] = {tool.name: tool.parameters for tool in self.tools}
        return OfferedTools(schemas=schemas, calls_before=calls_before, calls_max=self.calls_max)


def read_choice(choice: Json, tools: Sequence[Tool]) -> ToolChoice:
    """Parse OpenAI's `tool_choice`; None means `auto` with tools and `none` without."""
    if choice is None:
        return ToolChoice(Mode.AUTO if tools else Mode.NONE)
    if isinstance(choice, str) and choice in {mode.value for mode in Mode}:
        mode = Mode(choice)
        if mode is Mode.REQUIRED and not tools:
            text = "tool_choice is 'required', which requires tools"
            raise InvalidRequest(text, param="tool_choice")
        return ToolChoice(mode if tools else Mode.NONE)
    if (name := _named(choice)) is None:
        message = (
            "tool_choice must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
        raise InvalidRequest(message, param="tool_choice")
    if all(tool.name != name for tool in tools):
        raise InvalidRequest.at("tool_choice", not_offered(name, tools))
    return ToolChoice(Mode.REQUIRED, name)


def not_offered(name: str, tools: Sequence[Tool]) -> str:
    names = [repr(tool.name) for tool in tools[:_NAMES_SHOWN]]
    more = len(tools) - len(names)
    offered = f"available tools are {', '.join(names)}" if names else "no tools are available"
    rest = f" and {more} more" if more else ""
    return f"unknown tool {name!r}; {offered}{rest}"


def plan_tools(
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    format_: ToolFormat | None,
    *,
    parallel: bool,
    requires_strict: bool = True,
    constraint: Grammar | None = None,
) -> ToolPlan:
    """Decide which tools the model sees, the output constraint, and how the output is parsed.

    The `constraint` of text is ignored if the output must be a tool call. With `requires_strict`,
    strict tools that no grammar can enforce are refused.

    Raises:
        Unsupported: Such tools, or optional calls in an unknown format.
    """
    if not tools or choice.mode is Mode.NONE:
        return ToolPlan(grammar=constraint)
    calls_max = None if parallel else 1
    if choice.mode is Mode.AUTO:
        if format_ is None:
            raise Unsupported.at("tools", _FORMAT_UNKNOWN)
        if constraint is None:
            grammar = _strict_grammar(tools, format_, requires_strict=requires_strict)
            return ToolPlan(tools, format_, grammar, calls_max)
        plan = _required(tools, format_, tools, calls_max)
        assert plan.grammar is not None, "a required call has a grammar"
        return msgspec.structs.replace(plan, grammar=calls_or(plan.grammar, constraint))
    if choice.name is not None:
        named = tuple(tool for tool in tools if tool.name == choice.name)
        return _required(tools, format_, named, 1)
    return _required(tools, format_, tools, calls_max)


def _required(
    tools: tuple[Tool, ...],
    format_: ToolFormat | None,
    callable_: tuple[Tool, ...],
    calls_max: int | None,
) -> ToolPlan:
    """Output that must be tool calls: in the model's format if a grammar can, else as JSON."""
    if format_ is None or format_.form is None:
        return ToolPlan(tools, JSON_CALLS, calls_list(callable_, calls_max), calls_max)
    return ToolPlan(tools, format_, calls_only(callable_, format_.form, calls_max), calls_max)


def _strict_grammar(
    tools: tuple[Tool, ...], format_: ToolFormat, *, requires_strict: bool
) -> Grammar | None:
    if (strict := next((index for index, tool in enumerate(tools) if tool.strict), None)) is None:
        return None
    if format_.form is not None:
        return calls_within(tools, format_.form)
    if format_ is JSON_CALLS:
        return calls_or_text(tools)
    if not requires_strict:
        return None
    at = f"tools[{strict}].function.strict"
    text = (
        f"no grammar can produce tool calls in the format {format_.names[0]}, so their schema "
        "cannot be enforced; omit strict, or set tool_choice to 'required'"
    )
    raise Unsupported.at(at, text)


def _named(choice: Json) -> str | None:
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
