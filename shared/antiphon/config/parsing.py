"""How models write calls of tools and mark their thinking, by SGLang's names."""

from __future__ import annotations

from enum import StrEnum


class ToolParser(StrEnum):
    """A format of tool calls."""

    AUTO = "auto"
    NONE = "none"
    APERTUS2509 = "apertus2509"
    COHERE_COMMAND4 = "cohere_command4"
    DEEPSEEKV3 = "deepseekv3"
    DEEPSEEKV31 = "deepseekv31"
    DEEPSEEKV32 = "deepseekv32"
    DEEPSEEKV4 = "deepseekv4"
    DEEPSEEKV41 = "deepseekv41"
    DOTS = "dots"
    GLM = "glm"
    GLM45 = "glm45"
    GLM47 = "glm47"
    GPT_OSS = "gpt-oss"
    HERMES = "hermes"
    HUNYUAN = "hunyuan"
    INTERNS1 = "interns1"
    IQUEST_Q1 = "iquest_q1"
    JSON = "json"
    KIMI_K2 = "kimi_k2"
    KIMI_K3 = "kimi_k3"
    LFM2 = "lfm2"
    LING3 = "ling3"
    LLAMA3 = "llama3"
    MIMO = "mimo"
    MINICPM5 = "minicpm5"
    MINIMAX_M2 = "minimax-m2"
    MISTRAL = "mistral"
    NANBEIGE = "nanbeige"
    POOLSIDE_V1 = "poolside_v1"
    PYTHONIC = "pythonic"
    QWEN = "qwen"
    QWEN25 = "qwen25"
    QWEN3_CODER = "qwen3_coder"
    SPARK25 = "spark25"
    STEP3 = "step3"
    STEP3P5 = "step3p5"
    TRINITY = "trinity"


class ReasoningParser(StrEnum):
    """A format of thinking."""

    AUTO = "auto"
    NONE = "none"
    APERTUS2509 = "apertus2509"
    COHERE_COMMAND4 = "cohere_command4"
    DEEPSEEK_R1 = "deepseek-r1"
    DEEPSEEK_V3 = "deepseek-v3"
    DEEPSEEK_V4 = "deepseek-v4"
    DEEPSEEK_V41 = "deepseek-v41"
    DOTS = "dots"
    GIGACHAT35 = "gigachat35"
    GLM45 = "glm45"
    GPT_OSS = "gpt-oss"
    GRANITE_THINKING_PARSER = "granite_thinking_parser"
    HUNYUAN = "hunyuan"
    INTERNS1 = "interns1"
    IQUEST_Q1 = "iquest_q1"
    KIMI = "kimi"
    KIMI_K2 = "kimi_k2"
    KIMI_K3 = "kimi_k3"
    LING3 = "ling3"
    MIMO = "mimo"
    MINIMAX = "minimax"
    MINIMAX_APPEND_THINK = "minimax-append-think"
    MINIMAX_M3 = "minimax-m3"
    MISTRAL = "mistral"
    NANBEIGE = "nanbeige"
    NEMOTRON_3 = "nemotron_3"
    POOLSIDE_V1 = "poolside_v1"
    QWEN3 = "qwen3"
    QWEN3_THINKING = "qwen3-thinking"
    STEP3 = "step3"
    STEP3P5 = "step3p5"


ABSENT_TOOL_PARSERS = frozenset(
    {
        "beam", "gemma4", "gigachat3", "gigachat35", "inkling", "k2_horizon",
        "minimax-m3", "muse", "response_template",
    }
)  # fmt: skip
"""Those of SGLang's that are not built."""

ABSENT_REASONING_PARSERS = frozenset(
    {"beam", "gemma4", "inkling", "k2_horizon", "muse", "response_template"}
)
