"""Parses the body of a response into a chat request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec

from antiphon.gateway.http.core.chat import OutputParserOptions, renamed_fields, to_json
from antiphon.gateway.http.openai import parse as reading
from antiphon.gateway.http.openai.responses.items import (
    InputText,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
    images_of,
    left_out,
    new_id,
    read_item,
    turns,
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
from antiphon.gateway.http.openai.schema import (
    ChatBody,
    JsonSchemaFormat,
    OpenAiFields,
    ResponseFormat,
)
from antiphon.gateway.requests.generation_request import media_fields
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from antiphon.gateway.http.core.limits import Json
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.requests.generation_request import GenerationRequest, MediumSource

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_CONTENT = "reasoning.encrypted_content"
_UNSUPPORTED_INCLUDES = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
        "code_interpreter_call.outputs",
    }
)
"""Values of `include` about built-in tools and images, which no response here has."""
_CLIENT_FIELDS: tuple[tuple[re.Pattern[str], str], ...] = (
    # Field names of a chat, and of a response.
    (re.compile(r"^messages\[\d+\][\w.\[\]]*"), "input"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
)


_TOOL = re.compile(r"^tools\[(\d+)\](?:\.function\b)?")

Decrypt = Callable[[str, str], str]


class ParsedResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body, before the earlier conversation is known.

    `items` are the new ones, and `image_paths` the names of their images in the body.
    """

    id: str
    body: ResponsesBody
    items: tuple[Item, ...]
    image_paths: tuple[str, ...]
    tools: ResponseTools
    logprobs: bool
    include_encrypted: bool
    warnings: tuple[str, ...]


def parse_responses_request(body: ResponsesBody, decrypt: Decrypt) -> ParsedResponsesRequest:
    """Parse everything that does not depend on the earlier conversation."""
    _check_choice(body.tool_choice)
    tools, include = read_response_tools(body.tools or []), body.include or []
    items, image_paths, item_warnings = _items(body.input, decrypt)
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
        image_paths=image_paths,
        tools=tools,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        include_encrypted=ENCRYPTED_CONTENT in include,
        warnings=tuple(warnings),
    )


def check_include(names: Sequence[str]) -> list[str]:
    """Check `include`; return a warning for each value that does not apply to this server."""
    for index, name in enumerate(names):
        if name not in {LOGPROBS, ENCRYPTED_CONTENT} | _UNSUPPORTED_INCLUDES:
            known = f"supported values are {LOGPROBS} and {ENCRYPTED_CONTENT}"
            text = f"include: '{name}' is unknown; {known}"
            raise InvalidRequest(text, param=f"include[{index}]")
    return [
        f"include: {name} is not available and was ignored"
        for name in names
        if name in _UNSUPPORTED_INCLUDES
    ]


def prepare_responses_request(
    parsed: ParsedResponsesRequest, items: Sequence[Item], formats: Formats
) -> tuple[GenerationRequest, OutputParserOptions]:
    body = parsed.body
    with renamed_fields(partial(_renamed, parsed.tools.paths)):
        chat = reading.parse_chat(
            _chat(parsed, items), formats, requires_strict=parsed.tools.requires_strict
        )
    (gen_request,) = chat.gen_requests
    if body.max_output_tokens == 0:
        raise InvalidRequest("max_output_tokens must be at least 1", param="max_output_tokens")
    media = _named(gen_request.media, parsed.image_paths)
    gen_request = msgspec.structs.replace(
        gen_request,
        api="responses",
        media=media,
        fields={
            **gen_request.fields,
            **media_fields(media),
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "grammar": gen_request.field("grammar").replace("response_format", "text.format"),
        },
        key=ClientKey(parsed.id),
        auto_truncate=body.truncation is None,
    )
    return gen_request, chat.reply_options.parser_options


def _named(media: Sequence[MediumSource], image_paths: Sequence[str]) -> tuple[MediumSource, ...]:
    """Images with their names in the body; those of the earlier conversation come first."""
    names = [*["previous_response_id"] * len(media), *image_paths][len(image_paths) :]
    return tuple(
        msgspec.structs.replace(each, param=name) for each, name in zip(media, names, strict=True)
    )


def _chat(parsed: ParsedResponsesRequest, items: Sequence[Item]) -> ChatBody:
    body, reasoning = parsed.body, parsed.body.reasoning or ReasoningOptions()
    shared = {name: getattr(body, name) for name in OpenAiFields.__struct_fields__}
    return ChatBody(
        **shared,
        messages=turns(items, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        logprobs=parsed.logprobs,
        top_logprobs=body.top_logprobs,
        response_format=_response_format((body.text or TextOptions()).format),
        tools=list(parsed.tools.chat) or None,
        tool_choice=_choice(body.tool_choice, parsed.tools),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.effort,
        verbosity=(body.text or TextOptions()).verbosity,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
    )


def _items(
    given: str | list[Json], decrypt: Decrypt
) -> tuple[tuple[Item, ...], tuple[str, ...], Sequence[str]]:
    """Return the items, the paths of their images, and warnings."""
    if isinstance(given, str):
        content = [InputText(text=given)]
        return (MessageItem(id=new_id(MessageItem), role="user", content=list(content)),), (), ()
    if not given:
        raise InvalidRequest.at("input", "at least one item is required")
    items: list[Item] = []
    paths: list[str] = []
    warnings: list[str] = []
    for index, raw in enumerate(given):
        at = f"input[{index}]"
        if (kind := left_out(raw)) is not None:
            warnings.append(f"{at} was ignored: items of type {kind} are not supported")
            continue
        item = _decrypt_reasoning(read_item(raw, at), decrypt, at)
        items.append(item)
        paths += [f"{path}.image_url" for path, _ in images_of(item, at)]
    return tuple(items), tuple(paths), warnings


def _decrypt_reasoning(item: Item, decrypt: Decrypt, at: str) -> Item:
    if not isinstance(item, ReasoningItem) or item.encrypted_content is None:
        return item
    text = decrypt(item.encrypted_content, f"{at}.encrypted_content")
    return msgspec.structs.replace(item, content=[ReasoningText(text=text)])


def _ignored_option_warnings(body: ResponsesBody) -> list[str]:
    reasoning = body.reasoning or ReasoningOptions()
    stream = body.stream_options or ResponsesStreamOptions()
    summary = reasoning.summary or reasoning.generate_summary
    return [
        warning
        for applies, warning in (
            (
                body.service_tier not in (None, "auto", "default"),
                "service_tier is ignored: there is one service tier",
            ),
            (
                summary not in (None, "auto"),
                "reasoning.summary is ignored: reasoning is returned in full",
            ),
            (
                bool(stream.include_obfuscation),
                "stream_options.include_obfuscation is ignored: streams are not padded",
            ),
        )
        if applies
    ]


def _check_choice(choice: str | Json | None) -> None:
    if not isinstance(choice, dict):
        return
    kind = to_json(choice.get("type"), "tool_choice.type")
    if kind not in ("function", "custom"):
        raise Unsupported.at("tool_choice.type", f"must be 'function' or 'custom', not {kind!r}")


def _choice(choice: str | Json | None, tools: ResponseTools) -> str | Json | None:
    """Convert a tool choice to a chat's, with the tool name that the model sees."""
    if not isinstance(choice, dict):
        return choice
    fields = cast("dict[str, object]", to_json(choice, "tool_choice"))
    name, namespace = fields.get("name"), fields.get("namespace")
    if isinstance(name, str):
        within = namespace if isinstance(namespace, str) else None
        seen = model_name(name, within)
        names = [model for model, each in tools.targets.items() if each.name == name]
        if seen not in tools.targets and len(names) == 1:
            (seen,) = names
        fields = {"type": "function", "name": seen}
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None or given.type != "json_schema":
        return None if given is None else ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequest.at("text.format.schema", "a schema is required")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema))


def _renamed(tool_paths: Sequence[str], text: str) -> str:
    for pattern, name in _CLIENT_FIELDS:
        text = pattern.sub(name, text)
    return _TOOL.sub(lambda found: tool_paths[int(found[1])], text)
