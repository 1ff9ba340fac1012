"""What `tool_choice` asks for: which tools the model sees, what it is held to, how it is read.

```python
plan = plan_tools(read_tools(body_tools), read_choice(body.tool_choice), format_, parallel=True)
plan.tools       # for the chat template
plan.grammar     # for the request, None: unconstrained; `after_thinking` puts it behind thinking
plan.format      # for the AnswerParser, None: nothing is parsed
plan.offer(...)  # for the AnswerParser
```
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.tools.format import ToolFormat
from antiphon.gateway.parsing.tools.grammar import (
    calls_list,
    calls_only,
    calls_or,
    calls_or_text,
    calls_within,
)
from antiphon.gateway.parsing.tools.offered_tools import OfferedTools
from antiphon.gateway.parsing.tools.registry import JSON_CALLS
from antiphon.gateway.parsing.tools.tool import Tool
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.schemas import Json


_NAMES_SHOWN = 16
"""How many tools an error names."""


class Mode(Enum):
    """Whether the model calls tools."""

    AUTO = "auto"
    """As it likes."""
    REQUIRED = "required"
    """At least one."""
    NONE = "none"


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether, and which: with `name` the model has to call that tool."""

    mode: Mode
    name: str | None = None


class ToolPlan(msgspec.Struct, frozen=True):
    """What a request with tools comes to.

    Attributes:
        tools: Those that the chat template shows.
        format: How calls are read; None: nothing is a call.
        grammar: What the answer, or what follows its thinking, is held to.
        calls_max: Most calls that count.
    """

    tools: tuple[Tool, ...] = ()
    format: ToolFormat | None = None
    grammar: Grammar | None = None
    calls_max: int | None = None

    def offer(self, *, calls_before: int = 0, forward_unknown: bool = False) -> OfferedTools:
        """What an answer may call, for its parser.

        Args:
            calls_before: Calls in the messages of the request.
            forward_unknown: Whether calls of other tools count, too.
        """
        return OfferedTools(
            schemas={tool.name: tool.parameters for tool in self.tools},
            calls_before=calls_before,
            calls_max=self.calls_max,
            forward_unknown=forward_unknown,
        )


def read_choice(choice: Json, tools: Sequence[Tool], *, param: str = "tool_choice") -> ToolChoice:
    """Read OpenAI's `tool_choice`; None is `auto` with tools and `none` without.

    Raises:
        InvalidRequest: It is no choice, there are no tools to call, or the tool is not among them.
    """
    if choice is None:
        return ToolChoice(Mode.AUTO if tools else Mode.NONE)
    if isinstance(choice, str) and choice in {mode.value for mode in Mode}:
        mode = Mode(choice)
        if mode is Mode.REQUIRED and not tools:
            text = "tool_choice is 'required', and there are no tools: send some in tools"
            raise InvalidRequest(text, param=param)
        return ToolChoice(mode if tools else Mode.NONE)
    name = _named(choice)
    if name is None:
        message = (
            "tool_choice is 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
        raise InvalidRequest(message, param=param)
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(f"tool_choice: {not_offered(name, tools)}", param=param)
    return ToolChoice(Mode.REQUIRED, name)


def not_offered(name: str, tools: Sequence[Tool]) -> str:
    """Say that there is no tool of this name, and which there are."""
    names = [repr(tool.name) for tool in tools[:_NAMES_SHOWN]]
    more = len(tools) - len(names)
    offered = f"the tools are {', '.join(names)}" if names else "there are no tools"
    rest = f" and {more} more" if more else ""
    return f"there is no tool named {name!r}; {offered}{rest}"


def plan_tools(
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    format_: ToolFormat | None,
    *,
    parallel: bool,
    insists: bool = True,
    form: Grammar | None = None,
) -> ToolPlan:
    """Decide what the model sees, what it is held to and how its answer is read.

    Args:
        tools: Those of the request.
        choice: What it says of them.
        format_: How this model writes calls; None: it is not known.
        parallel: Whether there may be several calls in an answer.
        insists: Whether strict tools have to be held; or are where that can be done.
        form: The form of an answer that is no call. An answer that has to be a call has none.

    Raises:
        Unsupported: A tool is strict, the model may call it as it likes, and no grammar can hold
            what it writes.
    """
    if not tools or choice.mode is Mode.NONE:
        return ToolPlan(grammar=form)
    calls_max = None if parallel else 1
    if choice.mode is Mode.AUTO and form is not None:
        plan = _required(tools, format_, tools, calls_max)
        assert plan.grammar is not None, "a call that has to be is held to its form"
        return msgspec.structs.replace(plan, grammar=calls_or(plan.grammar, form))
    if choice.mode is Mode.AUTO:
        return ToolPlan(tools, format_, _strict_grammar(tools, format_, insists=insists), calls_max)
    if choice.name is not None:
        callable_, calls_max = tuple(t for t in tools if t.name == choice.name), 1
    else:
        callable_ = tools
    return _required(tools, format_, callable_, calls_max)


def _required(
    tools: tuple[Tool, ...],
    format_: ToolFormat | None,
    callable_: tuple[Tool, ...],
    calls_max: int | None,
) -> ToolPlan:
    """An answer that is calls, as the model writes them where a grammar can, else as JSON."""
    if format_ is None or format_.form is None:
        return ToolPlan(tools, JSON_CALLS, calls_list(callable_, calls_max), calls_max)
    return ToolPlan(tools, format_, calls_only(callable_, format_.form, calls_max), calls_max)


def _strict_grammar(
    tools: tuple[Tool, ...], format_: ToolFormat | None, *, insists: bool
) -> Grammar | None:
    """What holds the calls of strict tools where the model may call or not, if any is strict."""
    strict = next((index for index, tool in enumerate(tools) if tool.strict), None)
    if strict is None or format_ is None:
        return None
    if format_.form is not None:
        return calls_within(tools, format_.form)
    if format_ is JSON_CALLS:
        return calls_or_text(tools)
    if not insists:
        return None
    at = f"tools[{strict}].function.strict"
    text = (
        f"{at}: no grammar writes calls in the form {format_.names[0]}, so they cannot be held to "
        "a schema; leave strict out, or say tool_choice 'required'"
    )
    raise Unsupported(text, param=at)


def _named(choice: Json) -> str | None:
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
