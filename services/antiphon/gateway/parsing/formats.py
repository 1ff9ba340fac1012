"""Formats of tool calls and reasoning by name, and those of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.gateway.parsing.reasoning import ReasoningFormat
from antiphon.gateway.parsing.tools import gpt_oss, json_calls, pythonic, tags
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.config.gateway import GatewayConfig
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.wire.tokenize import EncodeReply


PATIENCE_S = 5.0  # how long the first request waits for a tokenizer to describe the template

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    json_calls.APERTUS,
    json_calls.COMMAND4,
    json_calls.DEEPSEEK_V3,
    json_calls.DEEPSEEK_V31,
    tags.DEEPSEEK_V32,
    tags.DEEPSEEK_V4,
    tags.DEEPSEEK_V41,
    tags.DOTS,
    tags.GLM,
    tags.IQUEST,
    gpt_oss.GPT_OSS,
    json_calls.HERMES,
    tags.HUNYUAN,
    json_calls.INTERN,
    json_calls.JSON_CALLS,
    json_calls.KIMI_K2,
    tags.KIMI_K3,
    pythonic.LFM2,
    json_calls.LLAMA3,
    tags.MINICPM5,
    tags.MINIMAX_M2,
    json_calls.MISTRAL,
    pythonic.PYTHONIC,
    tags.QWEN3_CODER,
    tags.STEP3,
)

_TOOLS = {name: format_ for format_ in TOOL_FORMATS for name in format_.names}


def tool_format(name: str) -> ToolFormat:
    if name not in _TOOLS:
        known = ", ".join(sorted(_TOOLS))
        message = f"unknown tool call parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="tool_call_parser")
    return _TOOLS[name]


def _think(
    *names: str, inside: bool = False, switch: str | None = None, shown: bool = False
) -> ReasoningFormat:
    return ReasoningFormat(names, "<think>", "</think>", inside=inside, switch=switch, shown=shown)


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(("apertus2509",), "<|inner_prefix|>", "<|inner_suffix|>", special=True),
    # Other tokens are around the answer.
    ReasoningFormat(
        ("cohere_command4",),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        special=True,
        around=json_calls.COMMAND4_AROUND,
    ),
    # Reasoning is a channel, and tool calls are others.
    ReasoningFormat(
        ("gpt-oss",),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        special=True,
        cuts=("<|call|>", "<|return|>", "<|start|>", "<|channel|>"),
        channels=gpt_oss.GPT_OSS,
    ),
    ReasoningFormat(("kimi",), "◁think▷", "◁/think▷"),
    # Reasoning is a block, and so is the answer.
    ReasoningFormat(
        ("kimi_k3",),
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        special=True,
        around=tags.KIMI_K3_AROUND,
    ),
    ReasoningFormat(("minimax-m3",), "<mm:think>", "</mm:think>"),
    # Only if `reasoning_effort` requests it.
    ReasoningFormat(("mistral",), "[THINK]", "[/THINK]", special=True),
    _think("deepseek-r1", "qwen3-thinking", "minimax", "step3", "step3p5", inside=True),
    # The reasoning is sent back as part of the answer, since the model expects it so.
    _think("minimax-append-think", inside=True, shown=True),
    _think("deepseek-v3", "deepseek-v4", "kimi_k2", switch="thinking"),
    _think(
        "deepseek-v41",
        "dots",
        "gigachat35",
        "granite_thinking_parser",
        "hunyuan",
        "iquest_q1",
        "ling3",
        "nanbeige",
        "poolside_v1",
    ),
    _think("qwen3", "glm45", "interns1", "mimo", "nemotron_3", switch="enable_thinking"),
)

_REASONING = {name: format_ for format_ in REASONING_FORMATS for name in format_.names}


def reasoning_format(name: str) -> ReasoningFormat:
    if name not in _REASONING:
        known = ", ".join(sorted(_REASONING))
        message = f"unknown reasoning parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="reasoning_parser")
    return _REASONING[name]


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
