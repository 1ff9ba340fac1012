"""The reasoning formats of models, by name."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.gateway.parsing.tools import gpt_oss, json_calls, kimi_k3
from antiphon.wire.errors import InvalidRequest


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
        around=kimi_k3.AROUND,
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

_BY_NAME = {name: format_ for format_ in REASONING_FORMATS for name in format_.names}


def reasoning_format(name: str) -> ReasoningFormat:
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        message = f"unknown reasoning parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="reasoning_parser")
    return _BY_NAME[name]
