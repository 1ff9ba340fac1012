"""The body of a response, read as a chat: one way from a conversation to a request."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec

from antiphon.gateway.ask import Ask
from antiphon.gateway.http.chats import plain
from antiphon.gateway.http.fields import decode
from antiphon.gateway.http.openai import reading
from antiphon.gateway.http.openai.bodies import ChatBody, JsonSchemaFormat, ResponseFormat, Sampled
from antiphon.gateway.http.openai.responses.bodies import (
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextFormat,
    TextOptions,
)
from antiphon.gateway.http.openai.responses.items import (
    InputText,
    Item,
    MessageItem,
    new_id,
    read_item,
)
from antiphon.gateway.http.openai.responses.replies import FunctionTool
from antiphon.gateway.http.openai.responses.turns import turns
from antiphon.gateway.http.openai.speech import Hearing
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from antiphon.gateway.http.openai.bodies import Json
    from antiphon.gateway.parsing.formats import Formats

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = {
    "reasoning.encrypted_content": "thinking is told as it is, in items of type reasoning",
    "message.input_image.image_url": "images are not read here",
}
_CALLED: tuple[tuple[re.Pattern[str], str], ...] = (
    # What a chat calls it, and what a response does.
    (re.compile(r"^messages\[\d+\][\w.\[\]]*"), "input"),
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was read, before it is known what came before it.

    Attributes:
        id: Of the response, and what its request is called.
        body: As it was sent.
        items: What is new in the conversation.
        tools: As they are told again.
        insists: Whether the client has said of one that it is strict; unsaid, they are, too.
        logprobs: Whether log-probabilities are told.
    """

    id: str
    body: ResponsesBody
    items: tuple[Item, ...]
    tools: tuple[FunctionTool, ...]
    insists: bool
    logprobs: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a response, and how its answer is taken apart."""

    ask: Ask
    hearing: Hearing


def said(body: ResponsesBody) -> Said:
    """Read all of a body that can be read without what came before it.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    _check_options(body)
    check_include(body.include or [])
    return Said(
        id=f"resp_{uuid4().hex}",
        body=body,
        items=_items(body.input),
        tools=tuple(_tool(tool, index) for index, tool in enumerate(body.tools or [])),
        insists=any(_says_strict(tool) for tool in body.tools or []),
        logprobs=bool(body.include or body.top_logprobs),
    )


def check_include(names: Sequence[str]) -> None:
    """Refuse what cannot be told besides.

    Raises:
        Unsupported: Says which, and why.
    """
    for index, name in enumerate(names):
        if name != LOGPROBS:
            why = _INCLUDES.get(name, "there are no built-in tools")
            raise Unsupported(f"include: '{name}': {why}", param=f"include[{index}]")


def asked(said: Said, items: Sequence[Item], formats: Formats) -> Asked:
    """Make the request of a whole conversation, of which the end is new.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    body = said.body
    with _called_otherwise():
        posted = reading.chat(_chat(said, items), formats, insists=said.insists)
    (ask,) = posted.asks
    forms = {"response_format": "text.format"}
    ask = msgspec.structs.replace(
        ask,
        door="responses",
        prompt_field="input",
        tokens_field="max_output_tokens",
        grammar_field=forms.get(ask.grammar_field, ask.grammar_field),
        key=ClientKey(said.id),
    )
    if body.max_output_tokens == 0:
        raise InvalidRequest("max_output_tokens is 1 or more", param="max_output_tokens")
    return Asked(ask=ask, hearing=posted.telling.hearing)


def _chat(said: Said, items: Sequence[Item]) -> ChatBody:
    body, reasoning = said.body, said.body.reasoning or ReasoningOptions()
    shared = {name: getattr(body, name) for name in Sampled.__struct_fields__}
    return ChatBody(
        **shared,
        messages=turns(items, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        logprobs=said.logprobs,
        top_logprobs=body.top_logprobs,
        response_format=_form((body.text or TextOptions()).format),
        tools=[_chat_tool(tool) for tool in said.tools] or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _items(given: str | list[Json]) -> tuple[Item, ...]:
    if isinstance(given, str):
        content = [InputText(text=given)]
        return (MessageItem(id=new_id(MessageItem), role="user", content=list(content)),)
    if not given:
        raise InvalidRequest("input: a conversation has items", param="input")
    return tuple(read_item(item, f"input[{index}]") for index, item in enumerate(given))


def _check_options(body: ResponsesBody) -> None:
    """Refuse values that are known and not served, of fields that are."""
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    stream = body.stream_options or ResponsesStreamOptions()
    no_summary = "the model writes no summaries; its thinking is told as it is"
    for field, value, neutral, why in (
        ("truncation", body.truncation, "disabled", "what is too long is refused, not cut"),
        ("service_tier", body.service_tier, "default", "there are no tiers"),
        ("text.verbosity", text.verbosity, "medium", "the model has no verbosity"),
        ("reasoning.summary", reasoning.summary, "auto", no_summary),
        ("reasoning.generate_summary", reasoning.generate_summary, "auto", no_summary),
        (
            "stream_options.include_obfuscation",
            stream.include_obfuscation,
            False,
            "streams are not padded",
        ),
    ):
        if value not in (None, neutral) and (field, value) != ("service_tier", "auto"):
            raise Unsupported(f"{field}: {why}", param=field)
    _check_choice(body.tool_choice)


def _check_choice(choice: str | Json | None) -> None:
    if not isinstance(choice, dict):
        return
    kind = plain(choice.get("type"), "tool_choice.type")
    if kind != "function":
        text = f"tool_choice.type: only 'function' is supported, not {kind!r}"
        raise Unsupported(text, param="tool_choice.type")


def _tool(raw: Json, index: int) -> FunctionTool:
    at = f"tools[{index}]"
    tool = cast("dict[str, object]", plain(raw, at))
    kind = tool.get("type")
    if kind != "function":
        text = f"{at}.type: only tools of type 'function' are supported: there is no {kind!r} here"
        raise Unsupported(text, param=f"{at}.type")
    tool["strict"] = tool.get("strict") is not False
    return decode(msgspec.json.encode(tool), FunctionTool, at)


def _says_strict(raw: Json) -> bool:
    tool = plain(raw, "tools")
    return isinstance(tool, dict) and tool.get("strict") is True


def _chat_tool(tool: FunctionTool) -> Json:
    """As chats write it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    whole = {"type": "function", "function": given}
    return msgspec.json.decode(msgspec.json.encode(whole), type=dict[str, msgspec.Raw])


def _form(given: TextFormat | None) -> ResponseFormat | None:
    if given is None or given.type != "json_schema":
        return None if given is None else ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequest("text.format.schema: it is needed", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema))


@contextmanager
def _called_otherwise() -> Generator[None]:
    """Name fields as responses call them in what a chat refuses."""
    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else _renamed(error.param)
        error.message = _renamed(error.message)
        raise


def _renamed(text: str) -> str:
    for pattern, name in _CALLED:
        text = pattern.sub(name, text)
    return text
