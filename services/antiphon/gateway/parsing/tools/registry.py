"""Tool call formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.tools import (
    apertus,
    cohere_command4,
    deepseek,
    deepseek_dsml,
    dots,
    glm,
    gpt_oss,
    hermes,
    hunyuan,
    interns1,
    json_calls,
    kimi_k2,
    kimi_k3,
    llama3,
    minicpm5,
    minimax_m2,
    mistral,
    pythonic,
    qwen3_coder,
    step3,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.gateway.parsing.tools.format import ToolFormat

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    apertus.FORMAT,
    cohere_command4.FORMAT,
    deepseek.V3,
    deepseek.V31,
    deepseek_dsml.V32,
    deepseek_dsml.V4,
    deepseek_dsml.V41,
    dots.FORMAT,
    glm.GLM,
    glm.IQUEST,
    gpt_oss.FORMAT,
    hermes.FORMAT,
    hunyuan.FORMAT,
    interns1.FORMAT,
    json_calls.FORMAT,
    kimi_k2.FORMAT,
    kimi_k3.FORMAT,
    pythonic.LFM2,
    llama3.FORMAT,
    minicpm5.FORMAT,
    minimax_m2.FORMAT,
    mistral.FORMAT,
    pythonic.PYTHONIC,
    qwen3_coder.FORMAT,
    step3.FORMAT,
)
JSON_CALLS = json_calls.FORMAT
"""Format of required calls if the model's own has no `form`."""

_BY_NAME = {name: format_ for format_ in TOOL_FORMATS for name in format_.names}


def tool_format(name: str) -> ToolFormat:
    """Return a format by name.

    Raises:
        InvalidRequest: It is unknown; the message lists the known ones.
    """
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        message = f"unknown tool call parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="tool_call_parser")
    return _BY_NAME[name]
