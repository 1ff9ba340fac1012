"""Selects the formats of a model: configured, or detected from its chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.gateway.parsing.reasoning.registry import reasoning_format
from antiphon.gateway.parsing.tools.registry import tool_format

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.config.gateway import GatewayConfig
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.wire.tokenize import EncodeReply

PATIENCE_S = 5.0  # how long the first request waits for a tokenizer to describe the template


class Formats(NamedTuple):
    """Formats of tool calls and reasoning; None if unknown, or not to be parsed."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


NO_FORMATS = Formats(None, None)


async def formats_of(
    config: GatewayConfig,
    card: Callable[[float], Awaitable[EncodeReply]],
    writes: Callable[[str], Awaitable[bool]],
) -> Formats:
    """Select the formats.

    A grammar form whose delimiters are special tokens of this model is removed, since grammars
    cannot produce them: `writes` is whether the tokenizers decode a delimiter as text. `card`
    describes the template; either is called only if it matters.
    """
    detects = (
        config.tool_call_parser == ToolParser.AUTO
        or config.reasoning_parser == ReasoningParser.AUTO
    )
    tools, reasoning = parsers_of(config, await card(PATIENCE_S) if detects else None)
    return Formats(
        tools=None if tools is None else await _formed(tool_format(tools), writes),
        reasoning=None if reasoning is None else reasoning_format(reasoning),
    )


async def _formed(format_: ToolFormat, writes: Callable[[str], Awaitable[bool]]) -> ToolFormat:
    for mark in format_.form.marks if format_.form else ():
        if not await writes(mark):
            return replace(format_, form=None)
    return format_


def parsers_of(config: GatewayConfig, shown: EncodeReply | None) -> tuple[str | None, str | None]:
    """Names of the tool call and reasoning formats, as far as they are known."""
    tools: str | None = config.tool_call_parser
    reasoning: str | None = config.reasoning_parser
    if tools == ToolParser.AUTO:
        tools = shown.tool_parser if shown else None
    if reasoning == ReasoningParser.AUTO:
        reasoning = shown.reasoning_parser if shown else None
    return (
        None if tools == ToolParser.NONE else tools,
        None if reasoning == ReasoningParser.NONE else reasoning,
    )
