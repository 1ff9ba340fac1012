"""Tool call formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.tools import gpt_oss, json_calls, kimi_k3, pythonic, tags
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.gateway.parsing.tools.format import ToolFormat

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
    kimi_k3.KIMI_K3,
    pythonic.LFM2,
    json_calls.LLAMA3,
    tags.MINICPM5,
    tags.MINIMAX_M2,
    json_calls.MISTRAL,
    pythonic.PYTHONIC,
    tags.QWEN3_CODER,
    tags.STEP3,
)

_BY_NAME = {name: format_ for format_ in TOOL_FORMATS for name in format_.names}


def tool_format(name: str) -> ToolFormat:
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        message = f"unknown tool call parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="tool_call_parser")
    return _BY_NAME[name]
