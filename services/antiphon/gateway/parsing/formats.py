"""Which formats answers have: what the operator said, or what the chat template shows."""

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

PATIENCE_S = 5.0
"""How long the first request waits for a tokenizer to say what the template shows."""


class Formats(NamedTuple):
    """How calls and thinking are written; None: not known, or not to be told apart."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


NO_FORMATS = Formats(None, None)


async def formats_of(
    config: GatewayConfig,
    card: Callable[[float], Awaitable[EncodeReply]],
    writes: Callable[[str], Awaitable[bool]],
) -> Formats:
    """Choose the formats.

    A form whose marks this model has as special tokens is left out: no grammar writes them.

    Args:
        config: What the operator said.
        card: What the tokenizers say of the model; asked only where it is left to the template.
        writes: Whether a mark is written as text, by the tokenizers; asked where that matters.

    Raises:
        EngineError: No tokenizer is there to say what the template shows.
    """
    gen_requests = (
        config.tool_call_parser == ToolParser.AUTO
        or config.reasoning_parser == ReasoningParser.AUTO
    )
    tools, reasoning = parsers_of(config, await card(PATIENCE_S) if gen_requests else None)
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
    """The names of the formats of calls and of thinking, as far as they are known.

    Args:
        config: What the operator said.
        shown: What the tokenizers say of the model, if they were asked.
    """
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
