"""The body of a response, read as a chat: one way from a conversation to a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec

from antiphon.gateway.http.core.output_parser import OutputParserOptions
from antiphon.gateway.http.core.tool_calls import to_json
from antiphon.gateway.http.openai import parse as reading
from antiphon.gateway.http.openai.responses.conversation import turns
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
from antiphon.gateway.http.openai.responses.schema import (
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextFormat,
    TextOptions,
)
from antiphon.gateway.http.openai.responses.tools import (
    ResponseTools,
    model_name,
    read_response_tools,
)
from antiphon.gateway.http.openai.schema import ChatBody, JsonSchemaFormat, ResponseFormat, Sampled
from antiphon.gateway.requests.generation_request import GenerationRequest
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from antiphon.gateway.http.openai.schema import Json
    from antiphon.gateway.parsing.formats import Formats

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_CONTENT = "reasoning.encrypted_content"
_UNSUPPORTED_INCLUDES = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
        "code_interpreter_call.outputs",
    }
)
"""Values of `include` that concern built-in tools and images, which no response here has."""
_CLIENT_FIELDS: tuple[tuple[re.Pattern[str], str], ...] = (
    # What a chat calls it, and what a response does.
    (re.compile(r"^messages\[\d+\][\w.\[\]]*"), "input"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
)


_TOOL = re.compile(r"^tools\[(\d+)\](?:\.function\b)?")

Decrypt = Callable[[str, str], str]


class ParsedResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
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


class PreparedResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a response, and how its answer is taken apart."""

    gen_request: GenerationRequest
    parser_options: OutputParserOptions


def parse_responses_request(body: ResponsesBody, unsealed: Decrypt) -> ParsedResponsesRequest:
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
    warnings = [
        *_ignored_option_warnings(body),
        *tools.warnings,
        *item_warnings,
        *check_include(include),
    ]
    return ParsedResponsesRequest(
        id=f"resp_{uuid4().hex}",
        body=body,
        items=items,
        tools=tools,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        sealed=ENCRYPTED_CONTENT in include,
        warnings=tuple(warnings),
    )


def check_include(names: Sequence[str]) -> list[str]:
    """Check `include`; return a warning for each value that no response here has.

    Raises:
        InvalidRequest: It is not known.
    """
    for index, name in enumerate(names):
        if name not in {LOGPROBS, ENCRYPTED_CONTENT} | _UNSUPPORTED_INCLUDES:
            known = f"{LOGPROBS} and {ENCRYPTED_CONTENT} are"
            text = f"include: '{name}' is not known; {known}"
            raise InvalidRequest(text, param=f"include[{index}]")
    return [f"include: there is no {name}" for name in names if name in _UNSUPPORTED_INCLUDES]


def prepare_responses_request(
    said: ParsedResponsesRequest, items: Sequence[Item], formats: Formats
) -> PreparedResponsesRequest:
    """Make the request of a whole conversation, of which the end is new.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    body = said.body
    with _rename_fields(said.tools.places):
        parsed = reading.parse_chat(_chat(said, items), formats, insists=said.tools.insists)
    (gen_request,) = parsed.gen_requests
    forms = {"response_format": "text.format"}
    gen_request = msgspec.structs.replace(
        gen_request,
        door="responses",
        prompt_field="input",
        tokens_field="max_output_tokens",
        grammar_field=forms.get(gen_request.grammar_field, gen_request.grammar_field),
        key=ClientKey(said.id),
        auto_truncate=body.truncation is None,
    )
    if body.max_output_tokens == 0:
        raise InvalidRequest("max_output_tokens is 1 or more", param="max_output_tokens")
    return PreparedResponsesRequest(
        gen_request=gen_request, parser_options=parsed.reply_options.parser_options
    )


def _chat(said: ParsedResponsesRequest, items: Sequence[Item]) -> ChatBody:
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


def _items(given: str | list[Json], unsealed: Decrypt) -> tuple[tuple[Item, ...], Sequence[str]]:
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
        items.append(_decrypt_reasoning(read_item(raw, at), unsealed, at))
    return tuple(items), warnings


def _decrypt_reasoning(item: Item, unsealed: Decrypt, at: str) -> Item:
    """Put the reasoning that a client has carried where the model reads it."""
    if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
        return item
    text = unsealed(item.encrypted_content, f"{at}.encrypted_content")
    return msgspec.structs.replace(item, content=[ReasoningText(text=text)])


def _ignored_option_warnings(body: ResponsesBody) -> list[str]:
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
    kind = to_json(choice.get("type"), "tool_choice.type")
    if kind not in ("function", "custom"):
        text = f"tool_choice.type: 'function' and 'custom' are supported, not {kind!r}"
        raise Unsupported(text, param="tool_choice.type")


def _choice(choice: str | Json | None, tools: ResponseTools) -> str | Json | None:
    """As chats write it, with the name that the model sees."""
    if not isinstance(choice, dict):
        return choice
    said = cast("dict[str, object]", to_json(choice, "tool_choice"))
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
def _rename_fields(places: Sequence[str]) -> Generator[None]:
    """Name fields as responses call them in what a chat refuses; `places` are those of tools."""
    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else _renamed(error.param, places)
        error.message = _renamed(error.message, places)
        raise


def _renamed(text: str, places: Sequence[str]) -> str:
    for pattern, name in _CLIENT_FIELDS:
        text = pattern.sub(name, text)
    return _TOOL.sub(lambda found: places[int(found[1])], text)
