"""Chat templates: the Jinja templates of model folders, in a sandbox.

The dialect is the one that Hugging Face tokenizers document: trimmed blocks, `raise_exception`,
`strftime_now`, a `tojson` that does not escape text and takes the options of json.dumps, loop
controls, and `{% generation %}` blocks, which only mark the assistant's text.
"""

from __future__ import annotations

import json
from datetime import datetime
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.tokenize import ChatMessage, MessagePart, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser


T = TypeVar("T")

_PLAIN = TemplateParams()
_SYSTEM, _DEVELOPER = "system", "developer"

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Exceptions that a template may raise on unexpected messages."""


_CONTINUED = "\N{OBJECT REPLACEMENT CHARACTER}to be continued "
"""Appended to the prefix of an answer, to find its end in the rendered text. Templates that trim
the assistant's content remove its last character."""


class GenerationBlock(Extension):
    """Renders the content of `{% generation %}` blocks: the tag matters only to training."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders a conversation as the text that the model was trained on.

    `tool_source` is the template for conversations with tools, if it is a different one.
    `special_tokens` are `bos_token`, `eos_token` and so on, which templates write themselves.

    Raises:
        jinja2.TemplateSyntaxError: A template is not valid.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        self._plain = _Compiled.of(source)
        self._with_tools = self._plain if tool_source is None else _Compiled.of(tool_source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[ChatMessage],
        params: TemplateParams = _PLAIN,
        *,
        continue_final: bool,
        markers: Sequence[MediumMarker] = (),
    ) -> str:
        """Render the conversation up to the start of the assistant's answer.

        Messages with media have a list of parts as their content, if the template reads such lists;
        else their text, with the marker of each medium where it is.

        With `continue_final` the last message is a prefix of the answer, and nothing that would end
        the answer is written after its content.

        Raises:
            InvalidRequest: The template rejects these messages, does not show the last one, or
                cannot render a value that is nested so deeply.
        """
        tools = _decoded(params.tools, list[dict[str, object]], "tools") or None
        options = _decoded(params.options, dict[str, object], "chat_template_kwargs") or {}
        compiled = self._with_tools if tools else self._plain
        known = messages if compiled.knows_developer else _without_developer(messages)
        variables = {
            **self._special_tokens,
            "documents": None,
            **options,
            "messages": _turns(known, markers, compiled, continue_final=continue_final),
            "tools": tools,
            "add_generation_prompt": params.generation_prompt and not continue_final,
        }
        try:
            text = compiled.template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from error
        except RecursionError as error:
            text = "chat template: what it is given is nested too deep"
            raise InvalidRequest(text, param=_deepest(messages, params)) from error
        return _cut_after(text, messages[-1].content) if continue_final else text


class MediumMarker(NamedTuple):
    """What templates call a medium (`image`, `video`, `audio`), and its marker in plain text.

    One of the kind `text` is unknown to templates: they write the marker as any text.
    """

    kind: str
    text: str


class _Compiled(NamedTuple):
    """A template, and whether it has the role `developer`, and parts of a message's content.

    With `only_parts` it shows no content that is a text.
    """

    template: jinja2.Template
    knows_developer: bool
    reads_parts: bool
    only_parts: bool

    @classmethod
    def of(cls, source: str) -> _Compiled:
        template = _environment().from_string(source)
        parts = _shows(template, [{"type": "image"}, {"type": "text", "text": _CONTINUED}])
        only_parts = parts and not _shows(template, _CONTINUED)
        return cls(template, _DEVELOPER in source, parts, only_parts)


def _shows(template: jinja2.Template, content: object) -> bool:
    """Whether a template writes the text of a content, and not the list of its parts as it is."""
    messages = [{"role": "user", "content": content}]
    try:
        text = template.render(messages=messages, add_generation_prompt=True, bos_token="")
    except _TEMPLATE_ERRORS:
        return False
    return _CONTINUED.strip() in text and "'type'" not in text


def _without_developer(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Replace the role `developer` by `system`.

    The messages before the first turn become one: many templates take a single system message.
    """
    if all(each.role != _DEVELOPER for each in messages):
        return messages
    first = list(takewhile(lambda each: each.role in (_SYSTEM, _DEVELOPER), messages))
    joined = "\n\n".join(each.content for each in first if each.content)
    before = [msgspec.structs.replace(first[0], role=_SYSTEM, content=joined)] if first else []
    rest = (
        msgspec.structs.replace(each, role=_SYSTEM) if each.role == _DEVELOPER else each
        for each in messages[len(first) :]
    )
    return [*before, *rest]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControlExtension]
    )
    environment.filters.update(tojson=_to_json)  # pyright: ignore[reportUnknownMemberType]
    environment.tests.update(none=_is_none, string=_is_string)  # pyright: ignore[reportUnknownMemberType]
    environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
        raise_exception=_raise, strftime_now=_strftime_now, dict=_new_dict, namespace=_new_namespace
    )
    return environment


def _turns(
    messages: Sequence[ChatMessage],
    markers: Sequence[MediumMarker],
    compiled: _Compiled,
    *,
    continue_final: bool,
) -> list[dict[str, object]]:
    turns = [_plain(message) for message in messages]
    for turn, message in zip(turns, messages, strict=True):
        if message.parts:
            turn["content"] = (
                [_part(part, markers) for part in message.parts]
                if compiled.reads_parts
                else "".join(_marked(part, markers) for part in message.parts)
            )
    if continue_final and messages[-1].content:
        turns[-1]["content"] = messages[-1].content + _CONTINUED
    if compiled.only_parts:
        for turn in turns:
            if isinstance(text := turn["content"], str):
                turn["content"] = [{"type": "text", "text": text}] if text else []
    return turns


def _part(part: MessagePart, markers: Sequence[MediumMarker]) -> dict[str, object]:
    if part.text is not None:
        return {"type": "text", "text": part.text}
    kind, text = _marker(part, markers)
    if kind == "text":
        return {"type": kind, "text": text}
    # Of audio, some templates look for the field, and not at the type.
    return {"type": kind, kind: ""} if kind == "audio" else {"type": kind}


def _marked(part: MessagePart, markers: Sequence[MediumMarker]) -> str:
    return _marker(part, markers).text if part.text is None else part.text


def _marker(part: MessagePart, markers: Sequence[MediumMarker]) -> MediumMarker:
    if part.medium is None or part.medium >= len(markers):
        raise InvalidRequest("a part of a message names no medium of the request", param="messages")
    return markers[part.medium]


def _plain(message: ChatMessage) -> dict[str, object]:
    """A message as templates read it: tool calls as in the OpenAI API, with parsed arguments."""
    plain = cast("dict[str, object]", msgspec.to_builtins(message))
    plain.pop("parts", None)
    if plain.pop("without_content", False) and not message.content:
        plain["content"] = NoContent()
    if message.reasoning_content is not None:
        # The name in the template of gpt-oss.
        plain = {"thinking": message.reasoning_content, **plain}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


class NoContent(str):
    """The content of a message without any: `none` to templates that test for it, else empty text.

    Templates that expect only text would otherwise write "None", or fail.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class ToolCallArguments(dict[str, object]):
    """The arguments of a tool call: usable in templates both as an object and as text.

    Some templates write `arguments | tojson` or iterate over the items, others write
    `'...' + arguments`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(msgspec.json.decode(text, type=dict[str, object]))
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _arguments(text: str) -> ToolCallArguments:
    try:
        return ToolCallArguments(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"the arguments of a tool call are no JSON object: {error}", param="messages"
        ) from error


def _decoded(text: str | None, kind: type[T], param: str) -> T | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _deepest(messages: Sequence[ChatMessage], params: TemplateParams) -> str:
    calls = [call.arguments for message in messages for call in message.tool_calls or ()]
    given = {
        "tools": params.tools or "",
        "chat_template_kwargs": params.options or "",
        "messages": max(calls, key=_nesting, default=""),
    }
    return max(given, key=lambda field: _nesting(given[field]))


def _nesting(text: str) -> int:
    """Approximate nesting depth of a JSON text: brackets in its strings count, too."""
    steps = ((letter in "[{") - (letter in "]}") for letter in text)
    return max(accumulate(steps), default=0)


def _cut_after(text: str, content: str) -> str:
    at = text.rfind(_CONTINUED.strip())
    if not content.strip() or at < 0:
        raise InvalidRequest(
            "the chat template does not show the final message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # parameters in the order of transformers' own filter
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        _for_json(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _for_json(value: object) -> object:
    """The same value with None in place of `NoContent`."""
    match value:
        case NoContent():
            return None
        case dict():
            items = cast("dict[object, object]", value).items()
            return {key: _for_json(each) for key, each in items}
        case list() | tuple():
            return [_for_json(each) for each in cast("Sequence[object]", value)]
        case _:
            return value


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, NoContent)


def _is_string(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, NoContent)


def _new_dict(*args: Mapping[str, object], **fields: object) -> dict[str, object]:
    """A function in place of the class, whose attributes a template must not reach."""
    return dict(*args, **fields)


def _new_namespace(*args: Mapping[str, object], **fields: object) -> Namespace:
    """A namespace for assignments within loops, without names that are special to Python."""
    fields = dict(*args, **fields)
    if any(name.startswith("_") for name in fields):
        raise jinja2.TemplateError("a namespace takes no names that begin with an underscore")
    return Namespace(fields)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
