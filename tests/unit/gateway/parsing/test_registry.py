"""Names, settings and documents agree on which formats there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import pytest

from antiphon.config.gateway import GatewayConfig
from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.config.sglang_arguments import values
from antiphon.gateway.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    formats_of,
    tool_format,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.tokenize import EncodeReply

ROOT = Path(__file__).resolve().parents[4]
CHOICES = {"auto", "none"}
Card = Callable[[float], Awaitable[EncodeReply]]


def card(tools: str | None = None, reasoning: str | None = None) -> Card:
    async def ask(_: float) -> EncodeReply:
        return EncodeReply(
            request_id=RequestId("r"),
            token_ids=b"",
            vocabulary_size=8,
            context_tokens=8,
            tool_parser=tools,
            reasoning_parser=reasoning,
        )

    return ask


async def text(_: str) -> bool:
    """Every mark is plain text to this model's tokenizer."""
    return True


def test_every_format_can_be_set_and_every_setting_is_a_format():
    tools = [name for format_ in TOOL_FORMATS for name in format_.names]
    reasoning = [name for format_ in REASONING_FORMATS for name in format_.names]
    assert sorted(tools) == sorted({*ToolParser} - CHOICES)
    assert sorted(reasoning) == sorted({*ReasoningParser} - CHOICES)
    assert not values()["--tool-call-parser"].keys() & {*tools}
    assert not values()["--reasoning-parser"].keys() & {*reasoning}


@pytest.mark.parametrize(
    ("said", "shown", "name"),
    [
        ("auto", "hermes", "hermes"),
        ("auto", None, None),
        ("none", "hermes", None),
        ("glm", "hermes", "glm45"),
    ],
)
async def test_configured_format_takes_precedence_over_the_template(
    said: str, shown: str | None, name: str | None
):
    config = GatewayConfig(tool_call_parser=ToolParser(said))
    formats = await formats_of(config, card(tools=shown), text)
    assert formats.tools == (tool_format(name) if name else None)


async def test_a_form_with_special_tokens_is_left_out() -> None:
    config = GatewayConfig(tool_call_parser=ToolParser("kimi_k2"))
    plain = (await formats_of(config, card(), text)).tools
    assert plain == tool_format("kimi_k2")
    assert plain is not None

    async def special(mark: str) -> bool:
        return mark != "<|tool_call_argument_begin|>"

    held = (await formats_of(config, card(), special)).tools
    assert held == dataclasses.replace(plain, form=None)


async def test_thinking_is_chosen_likewise():
    assert (await formats_of(GatewayConfig(), card(reasoning="qwen3"), text)).reasoning is not None
    none = GatewayConfig(reasoning_parser=ReasoningParser.NONE)
    assert (await formats_of(none, card(reasoning="qwen3"), text)).reasoning is None


async def test_configured_formats_need_no_detection():
    async def never(_: object) -> NoReturn:
        raise AssertionError("asked")

    config = GatewayConfig(tool_call_parser=ToolParser.JSON, reasoning_parser=ReasoningParser.NONE)
    assert (await formats_of(config, never, never)).tools == tool_format("json")
