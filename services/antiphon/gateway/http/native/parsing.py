"""POST /parse_function_call and /separate_reasoning: answers taken apart after the fact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.limits import Tools
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.tool_calls import to_json
from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.reasoning.registry import reasoning_format
from antiphon.gateway.parsing.tools.offered_tools import OfferedTools
from antiphon.gateway.parsing.tools.registry import tool_format
from antiphon.gateway.parsing.tools.tool import read_tools

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.wire.schemas import Json

Object = dict[str, msgspec.Raw]

_INLINE_BYTES_MAX = 8 * 1024
"""Larger texts are parsed in a child process: a parser takes up to 1 us a character."""
_SEPARATE = {"return_blocks": UnsupportedField("blocks are told as one text", (False,))}


class ParseBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /parse_function_call."""

    text: Annotated[str, Meta(description="What the model said.")]
    tools: Annotated[Tools[Object], Meta(description="The functions that it may have called.")]
    tool_call_parser: Annotated[str, Meta(description="How it writes calls, as hermes.")]


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call; `parameters` is a JSON text if the model wrote one."""

    tool_index: int
    name: str
    parameters: str


class ParseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The text without its calls, and these."""

    normal_text: str
    calls: list[ParsedCall]


class SeparateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /separate_reasoning."""

    text: Annotated[str, Meta(description="What the model said.")]
    reasoning_parser: Annotated[str, Meta(description="How it marks its thinking, as qwen3.")]


class SeparateReply(msgspec.Struct, frozen=True, kw_only=True):
    """Thinking and the rest."""

    reasoning_text: str
    text: str


class ParsingEndpoints:
    """Asks nobody."""

    def __init__(self, response_handler: ResponseHandler) -> None:
        self._response_handler = response_handler

    def operations(self) -> list[Operation]:
        """Both."""
        return [
            Operation(
                method="POST",
                path="/parse_function_call",
                handler=self._calls,
                summary="The calls in a text.",
                body=ParseBody,
                reply=ParseReply,
                examples=(
                    {
                        "text": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                        "tool_call_parser": "hermes",
                    },
                ),
            ),
            Operation(
                method="POST",
                path="/separate_reasoning",
                handler=self._separate,
                summary="The thinking in a text.",
                body=SeparateBody,
                reply=SeparateReply,
                unsupported=_SEPARATE,
                examples=({"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"},),
            ),
        ]

    async def _calls(self, request: web.Request) -> web.Response:
        return await self._response_handler.compute(
            request, ParseBody, parsed_calls, inline_bytes_max=_INLINE_BYTES_MAX
        )

    async def _separate(self, request: web.Request) -> web.Response:
        return await self._response_handler.compute(
            request, SeparateBody, separated, _SEPARATE, inline_bytes_max=_INLINE_BYTES_MAX
        )


def parsed_calls(body: ParseBody) -> ParseReply:
    """Parse a text with calls in it.

    Raises:
        InvalidRequest: There is no such parser, or a tool is malformed.
    """
    tools = read_tools(cast("list[Json]", to_json(body.tools, "tools")))
    offer = OfferedTools(schemas={tool.name: tool.parameters for tool in tools})
    parser = AnswerParser(tools=tool_format(body.tool_call_parser), offer=offer)
    parsed = parse(parser, [body.text])
    calls = [
        ParsedCall(tool_index=call.index, name=call.name, parameters=call.arguments)
        for call in parsed.calls
    ]
    return ParseReply(normal_text=parsed.content, calls=calls)


def separated(body: SeparateBody) -> SeparateReply:
    """Parse a text with thinking in it.

    Raises:
        InvalidRequest: There is no such parser.
    """
    format_ = reasoning_format(body.reasoning_parser)
    inside = format_.begins_inside(None)
    parsed = parse(AnswerParser(reasoning=format_, inside=inside), [body.text])
    return SeparateReply(reasoning_text=parsed.reasoning, text=parsed.content)
