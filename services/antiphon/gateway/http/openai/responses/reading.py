"""The body of a response, read as a chat: one way from a conversation to a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec

from antiphon.gateway.ask import Ask
from antiphon.gateway.http.chats import plain
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
    ReasoningItem,
    ReasoningText,
    left_out,
    new_id,
    read_item,
)
from antiphon.gateway.http.openai.responses.tools import (
    ResponseTools,
    model_name,
    read_response_tools,
)
from antiphon.gateway.http.openai.responses.turns import turns
from antiphon.gateway.http.openai.speech import Hearing
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from antiphon.gateway.http.openai.bodies import Json
    from antiphon.gateway.parsing.formats import Formats

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
_NOT_TOLD = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
        "code_interpreter_call.outputs",
    }
)
"""Values of `include` that concern built-in tools and images, which no response here has."""
_CALLED: tuple[tuple[re.Pattern[str], str], ...] = (
    # What a chat calls it, and what a response does.
    (re.compile(r"^messages\[\d+\][\w.\[\]]*"), "input"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
)


_TOOL = re.compile(r"^tools\[(\d+)\](?:\.function\b)?")

Unsealed = Callable[[str, str], str]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was read, before it is known what came before it.

    Attributes:
        id: Of the response, and what its request is called.
        body: As it was sent.
        items: What is new in the conversation.
        tools: Those that it offers.
        logprobs: Whether log-probabilities are told.
        sealed: Whether reasoning is told sealed, too.
        warnings: What of the body was left out.
    """

    id: str
    body: ResponsesBody
    items: tuple[Item, ...]
    tools: ResponseTools
    logprobs: bool
    sealed: bool
    warnings: tuple[str, ...]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a response, and how its answer is taken apart."""

    ask: Ask
    hearing: Hearing


def said(body: ResponsesBody, unsealed: Unsealed) -> Said:
    """Read all of a body that can be read without what came before it.

    Args:
        body: What was sent.
        unsealed: Reads sealed reasoning; the second argument is where it stands.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    _check_choice(body.tool_choice)
    tools, include = read_response_tools(body.tools or []), body.include or []
    items, item_warnings = _items(body.input, unsealed)
    warnings = [*_options_left_out(body), *tools.warnings, *item_warnings, *check_include(include)]
    return Said(
        id=f"resp_{uuid4().hex}",
        body=body,
        items=items,
        tools=tools,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        sealed=SEALED in include,
        warnings=tuple(warnings),
    )


def check_include(names: Sequence[str]) -> list[str]:
    """Check `include`; return a warning for each value that no response here has.

    Raises:
        InvalidRequest: It is not known.
    """
    for index, name in enumerate(names):
        if name not in {LOGPROBS, SEALED} | _NOT_TOLD:
            known = f"{LOGPROBS} and {SEALED} are"
            text = f"include: '{name}' is not known; {known}"
            raise InvalidRequest(text, param=f"include[{index}]")
    return [f"include: there is no {name}" for name in names if name in _NOT_TOLD]


def asked(said: Said, items: Sequence[Item], formats: Formats) -> Asked:
    """Make the request of a whole conversation, of which the end is new.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    body = said.body
    with _called_otherwise(said.tools.places):
        posted = reading.chat(_chat(said, items), formats, insists=said.tools.insists)
    (ask,) = posted.asks
    forms = {"response_format": "text.format"}
    ask = msgspec.structs.replace(
        ask,
        door="responses",
        prompt_field="input",
        tokens_field="max_output_tokens",
        grammar_field=forms.get(ask.grammar_field, ask.grammar_field),
        key=ClientKey(said.id),
        auto_truncate=body.truncation is None,
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
        tools=list(said.tools.chat) or None,
        tool_choice=_choice(body.tool_choice, said.tools),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.effort,
        verbosity=(body.text or TextOptions()).verbosity,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _items(given: str | list[Json], unsealed: Unsealed) -> tuple[tuple[Item, ...], Sequence[str]]:
    """The items of an input, and warnings of those that were left out."""
    if isinstance(given, str):
        content = [InputText(text=given)]
        return (MessageItem(id=new_id(MessageItem), role="user", content=list(content)),), ()
    if not given:
        raise InvalidRequest("input: a conversation has items", param="input")
    items: list[Item] = []
    warnings: list[str] = []
    for index, raw in enumerate(given):
        at = f"input[{index}]"
        kind = left_out(raw)
        if kind is not None:
            warnings.append(f"{at} was left out: the model is shown no {kind}")
            continue
        items.append(_unsealed(read_item(raw, at), unsealed, at))
    return tuple(items), warnings


def _unsealed(item: Item, unsealed: Unsealed, at: str) -> Item:
    """Put the reasoning that a client has carried where the model reads it."""
    if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
        return item
    text = unsealed(item.encrypted_content, f"{at}.encrypted_content")
    return msgspec.structs.replace(item, content=[ReasoningText(text=text)])


def _options_left_out(body: ResponsesBody) -> list[str]:
    """Warnings of options that change nothing here."""
    reasoning = body.reasoning or ReasoningOptions()
    stream = body.stream_options or ResponsesStreamOptions()
    summary = reasoning.summary or reasoning.generate_summary
    return [
        warning
        for applies, warning in (
            (
                body.service_tier not in (None, "auto", "default"),
                "service_tier: there is one tier",
            ),
            (
                summary not in (None, "auto"),
                "reasoning.summary: the model writes none; its thinking is returned as it is",
            ),
            (bool(stream.include_obfuscation), "stream_options: streams are not padded"),
        )
        if applies
    ]


def _check_choice(choice: str | Json | None) -> None:
    if not isinstance(choice, dict):
        return
    kind = plain(choice.get("type"), "tool_choice.type")
    if kind not in ("function", "custom"):
        text = f"tool_choice.type: 'function' and 'custom' are supported, not {kind!r}"
        raise Unsupported(text, param="tool_choice.type")


def _choice(choice: str | Json | None, tools: ResponseTools) -> str | Json | None:
    """As chats write it, with the name that the model sees."""
    if not isinstance(choice, dict):
        return choice
    said = cast("dict[str, object]", plain(choice, "tool_choice"))
    name, namespace = said.get("name"), said.get("namespace")
    if isinstance(name, str):
        within = namespace if isinstance(namespace, str) else None
        seen = model_name(name, within)
        names = [model for model, each in tools.targets.items() if each.name == name]
        if seen not in tools.targets and len(names) == 1:
            (seen,) = names
        said = {"type": "function", "name": seen}
    return msgspec.json.decode(msgspec.json.encode(said), type=dict[str, msgspec.Raw])


def _form(given: TextFormat | None) -> ResponseFormat | None:
    if given is None or given.type != "json_schema":
        return None if given is None else ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequest("text.format.schema: it is needed", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema))


@contextmanager
def _called_otherwise(places: Sequence[str]) -> Generator[None]:
    """Name fields as responses call them in what a chat refuses; `places` are those of tools."""
    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else _renamed(error.param, places)
        error.message = _renamed(error.message, places)
        raise


def _renamed(text: str, places: Sequence[str]) -> str:
    for pattern, name in _CALLED:
        text = pattern.sub(name, text)
    return _TOOL.sub(lambda found: places[int(found[1])], text)
