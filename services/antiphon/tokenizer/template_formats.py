"""Detects the output formats of a model by its chat template."""

# ruff: noqa: RUF001  # these bars are part of some markers

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.parsing import ReasoningParser, ToolParser

if TYPE_CHECKING:
    from collections.abc import Sequence

P = TypeVar("P")


class TemplateFormats(msgspec.Struct, frozen=True):
    """The tool-call and reasoning formats; None where the template does not show a unique one.

    With `reranks` the template asks whether a document answers a query, yes or no.
    """

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    reranks: bool = False


def detect_formats(template: str) -> TemplateFormats:
    """Detect the formats in a template's source by markers that only one format has."""
    plain = template.replace("\\", "").lower()
    return TemplateFormats(
        tools=_only(template, _TOOLS),
        reasoning=_only(template, _REASONING),
        reranks=all(mark in plain for mark in _RERANKING),
    )


def _only(template: str, rows: Sequence[tuple[P, tuple[str, ...], tuple[str, ...]]]) -> P | None:
    found = [
        parser
        for parser, marks, others in rows
        if all(mark in template for mark in marks) and not any(mark in template for mark in others)
    ]
    return found[0] if len(found) == 1 else None


_ELEMENTS = ("<function=", "<arg_key>", "<invoke ")
_TOOLS = (
    (ToolParser.HERMES, ("<tool_call>", '"name"'), _ELEMENTS),
    (ToolParser.QWEN3_CODER, ("<tool_call>", "<function="), ("<arg_key>",)),
    (ToolParser.GLM45, ("<tool_call>", "<arg_key>"), ("<function=", "<tool_sep>")),
    (ToolParser.HUNYUAN, ("<tool_call>", "<tool_sep>", "<arg_key>"), ()),
    (ToolParser.COHERE_COMMAND4, ("<|START_ACTION|>",), ()),
    (ToolParser.MINICPM5, ('<function name="', '<param name="'), ()),
    (ToolParser.LLAMA3, ("<|python_tag|>",), ()),
    (ToolParser.MISTRAL, ("[TOOL_CALLS]",), ()),
    (ToolParser.DEEPSEEKV3, ("<｜tool▁call▁begin｜>", "```json"), ()),
    (ToolParser.DEEPSEEKV31, ("<｜tool▁call▁begin｜>",), ("```json",)),
    (ToolParser.DEEPSEEKV32, ("｜DSML｜", "function_calls"), ()),
    (ToolParser.KIMI_K2, ("<|tool_calls_section_begin|>",), ()),
    (ToolParser.KIMI_K3, ("<|open|>", "<|sep|>"), ()),
    (ToolParser.GPT_OSS, ("<|channel|>", "<|constrain|>"), ()),
    (ToolParser.MINIMAX_M2, ("<minimax:tool_call>",), ()),
    (ToolParser.LFM2, ("<|tool_call_start|>",), ()),
    (ToolParser.APERTUS2509, ("<|tools_prefix|>",), ()),
    (ToolParser.STEP3, ("<steptml:invoke",), ()),
)
"""Parser, markers that must be present, markers that must be absent."""

_RERANKING = ("answer can only be", '"yes"', '"no"')
"""Phrases in the template of a reranking decoder, such as Qwen3's."""

_OTHER_THINKING = (
    *("<|channel|>", "[THINK]", "◁think▷", "<|inner_prefix|>", "<mm:think>"),
    "<|START_THINKING|>",
)
_REASONING = (
    # Whether an answer begins with reasoning shows at the end of the prompt: one name suffices.
    (ReasoningParser.QWEN3, ("<think>", "</think>"), _OTHER_THINKING),
    (ReasoningParser.KIMI, ("◁think▷",), ()),
    (ReasoningParser.MISTRAL, ("[THINK]", "[/THINK]"), ()),
    (ReasoningParser.APERTUS2509, ("<|inner_prefix|>",), ()),
    (ReasoningParser.GPT_OSS, ("<|channel|>", "analysis"), ()),
    (ReasoningParser.MINIMAX_M3, ("<mm:think>",), ()),
    (ReasoningParser.KIMI_K3, ("<|open|>", "<|sep|>"), ()),
    (ReasoningParser.COHERE_COMMAND4, ("<|START_THINKING|>",), ()),
)
