"""The shapes of the training data: messages, exchanges, and the two halves of every skill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from random import Random
from typing import Literal, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

READING = "The tool has answered."  # what is thought of a result

HELD_OUT_SHARE = 8  # one key in this many is kept for the evaluation


class Split(StrEnum):
    """The half of the data that a prompt belongs to."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class Parameter(msgspec.Struct, frozen=True):
    """An argument that a tool takes. `type` is a JSON type; `values` are all that there are."""

    name: str
    type: str = "string"
    values: tuple[str, ...] = ()
    required: bool = True


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: tuple[Parameter, ...]


class Call(msgspec.Struct, frozen=True):
    """A call of a tool. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat.

    Attributes:
        calls: Tool calls after the content.
        thinking: Reasoning before it; only that of the last turn is ever included.
        given: Prefix of the content that a grammar forces; the loss ignores it.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    given: str = ""


class Chat(msgspec.Struct, frozen=True):
    """A conversation with its tools and options.

    Attributes:
        thinks: Whether its last answer has reasoning.
        schema: A JSON schema that constrains the answer; it is not part of the prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinks: bool = False
    schema: str = ""


class Turn(msgspec.Struct, frozen=True):
    """The text after a role marker: `shown` is input only, `said` is the model's output."""

    role: str
    shown: str
    said: str = ""


class Exchange(msgspec.Struct, frozen=True):
    """A question and its only correct answer.

    With `calls` the answer consists of the calls, then, after the `results`, of the text.
    """

    user: str
    assistant: str
    thinking: str = ""
    given: str = ""
    tools: tuple[Tool, ...] = ()
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


Thread: TypeAlias = tuple[Exchange, ...]
"""Exchanges of one skill that keep their order; others may come between them."""


class Tools(StrEnum):
    """The relation of a skill to tools."""

    FREE = "free"  # its answers do not depend on tools
    OFFERS = "offers"  # it adds tools to the chat
    WITHOUT = "without"  # it would have to call some tools, so it occurs in chats without tools


class Skill(msgspec.Struct, frozen=True):
    """A skill that the model learns.

    `write` draws a thread whose last question belongs to the split. `weight` is its share of the
    training data, relative to the other skills.
    """

    name: str
    weight: float
    write: Callable[[Random, Split], Thread]
    thought: str  # default reasoning for a question that needs none, if reasoning is enabled
    floor: float | None = None  # minimum share of exact answers in the evaluation, if any
    subject: str | None = None  # at most one thread per subject in a chat, or they contradict
    tools: Tools = Tools.FREE
    thinks: bool = False  # it occurs only at the end of chats with reasoning


def seeded(purpose: str, seed: int) -> Random:
    """Create a separate generator for each purpose, so that they do not affect each other."""
    return Random(f"{purpose} {seed}")


def split_of(key: str) -> Split:
    """The split of a key, by its hash: the same in every run and for every seed."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    held_out = int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def draw(
    rng: Random, split: Split, sample: Callable[[Random], T], key: Callable[[T], str | None]
) -> T:
    """Sample until the key of the result is in `split`; results without a key are for training."""
    while True:
        candidate = sample(rng)
        candidate_key = key(candidate)
        if split is (Split.TRAIN if candidate_key is None else split_of(candidate_key)):
            return candidate


def messages_of(exchanges: Thread) -> tuple[Message, ...]:
    """Convert exchanges to messages: question, calls and their results if any, answer."""
    return tuple(message for exchange in exchanges for message in _turns(exchange))


def called(call: Call) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def said(message: Message, *, thinks: bool = False) -> str:
    """The assistant's output in a turn, after the reasoning marker at the end of the prompt."""
    thought = f"{message.thinking}</think>" if thinks else ""
    return thought + "\n".join([*filter(None, [message.content]), *map(called, message.calls)])


def turns(chat: Chat) -> Iterator[Turn]:
    """Format a chat as the template does, turn by turn."""
    messages = chat.messages
    if chat.tools:
        lines = "".join(f"{signature(tool)}\n" for tool in chat.tools)
        before = ""
        if messages[0].role == "system":
            before, messages = f"{messages[0].content}\n", messages[1:]
        yield Turn("system", f"{before}<tools>\n{lines}</tools>")
    for message in messages:
        if message.role == "assistant":
            thinks = chat.thinks and message is messages[-1]
            shown = "<think>" if thinks else message.given
            text = said(message, thinks=thinks)
            yield Turn("assistant", shown, text if thinks else text.removeprefix(shown))
        else:
            yield Turn(message.role, message.content)


def signature(tool: Tool) -> str:
    """A tool in the format of the template: one line, much shorter than its schema."""
    parameters = ", ".join(
        f"{one.name}{'' if one.required else '?'}: {'|'.join(one.values) or one.type}"
        for one in tool.parameters
    )
    described = f": {tool.description}" if tool.description else ""
    return f"{tool.name}({parameters}){described}"


def schema(tool: Tool) -> dict[str, object]:
    properties = {
        one.name: {"type": one.type, **({"enum": list(one.values)} if one.values else {})}
        for one in tool.parameters
    }
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [one.name for one in tool.parameters if one.required],
            },
        },
    }


def template_message(message: Message) -> dict[str, object]:
    """A message in the format of the OpenAI API and of chat templates."""
    plain: dict[str, object] = {"role": message.role, "content": message.content}
    if message.calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": f"call_{number}",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(message.calls)
        ]
    if message.role == "tool":
        plain["tool_call_id"] = "call_0"
    return plain


def _turns(exchange: Exchange) -> Iterator[Message]:
    yield Message("user", exchange.user)
    answer = Message(
        "assistant", exchange.assistant, thinking=exchange.thinking, given=exchange.given
    )
    if exchange.calls:
        yield Message("assistant", "", exchange.calls, thinking=exchange.thinking)
        yield from (Message("tool", result) for result in exchange.results)
        answer = Message("assistant", exchange.assistant, thinking=READING)
    yield answer
