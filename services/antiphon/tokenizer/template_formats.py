"""What a chat template shows of how its model answers."""

# ruff: noqa: RUF001  # these bars are the letters of some marks

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.parsing import ReasoningParser, ToolParser

if TYPE_CHECKING:
    from collections.abc import Sequence

P = TypeVar("P")


class TemplateFormats(msgspec.Struct, frozen=True):
    """The formats of calls and thinking; None where the template does not show one for certain.

    With `reranks` it asks whether a document answers a query, yes or no.
    """

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    reranks: bool = False


def detect_formats(template: str) -> TemplateFormats:
    """Read a template's source: marks that one format alone has tell which it is."""
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
"""Parser, marks that have to be there, marks that must not."""

_RERANKING = ("answer can only be", '"yes"', '"no"')
"""What the template of a decoder that reranks asks for, as Qwen3's does."""

_OTHER_THINKING = (
    *("<|channel|>", "[THINK]", "◁think▷", "<|inner_prefix|>", "<mm:think>"),
    "<|START_THINKING|>",
)
_REASONING = (
    # Where an answer begins as thinking, the end of the prompt shows it: one name does for all.
    (ReasoningParser.QWEN3, ("<think>", "</think>"), _OTHER_THINKING),
    (ReasoningParser.KIMI, ("◁think▷",), ()),
    (ReasoningParser.MISTRAL, ("[THINK]", "[/THINK]"), ()),
    (ReasoningParser.APERTUS2509, ("<|inner_prefix|>",), ()),
    (ReasoningParser.GPT_OSS, ("<|channel|>", "analysis"), ()),
    (ReasoningParser.MINIMAX_M3, ("<mm:think>",), ()),
    (ReasoningParser.KIMI_K3, ("<|open|>", "<|sep|>"), ()),
    (ReasoningParser.COHERE_COMMAND4, ("<|START_THINKING|>",), ()),
)
