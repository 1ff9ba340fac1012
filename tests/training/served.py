"""Answers the evaluation's prompts with a running stack, as a client."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientSession, ClientTimeout
from tests.training.dialogue import (
    Call,
    Message,
    said,
    schema,
    template_message,
)

from antiphon.client import Client
from antiphon.wire.sampling import Grammar, GrammarKind
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.training.dialogue import Chat

    from antiphon.wire.generate import CompleteOptions

AT_ONCE = 16


class ServedModel:
    """Generates over NATS, several chats at a time. Implements `Generate`."""

    def __init__(self, nats_url: str, model: str) -> None:
        self._nats_url = nats_url
        self._model = model

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer each chat greedily."""
        return asyncio.run(self._answers(chats, tokens_max))

    async def _answers(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def answer(client: Client, chat: Chat) -> str:
            options: CompleteOptions = {"temperature": 0.0, "max_tokens": tokens_max}
            options["chat_template_kwargs"] = json.dumps({"enable_thinking": chat.thinks})
            if chat.tools:
                options["tools"] = json.dumps([schema(tool) for tool in chat.tools])
            if chat.schema:
                options["grammar"] = Grammar(kind=GrammarKind.JSON_SCHEMA, text=chat.schema)
            async with slots:
                completion = await client.complete(
                    self._model, list(map(_turn, chat.messages)), **options
                )
            return completion.text

        async with Client(self._nats_url) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(client, chat)) for chat in chats]
        return [task.result() for task in tasks]


class HttpModel:
    """Generates over HTTP with the OpenAI API. Implements `Generate`.

    The parsed answer is formatted again as the model wrote it: an answer that the gateway's parsers
    did not parse counts as wrong.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer each chat greedily."""
        return asyncio.run(self._answers(chats, tokens_max))

    async def _answers(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def answer(session: ClientSession, chat: Chat) -> str:
            body = self._body(chat) | {"max_tokens": tokens_max}
            async with slots, session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
                completion = msgspec.json.decode(await reply.read(), type=_Reply)
            return said(completion.choices[0].message.plain(), thinks=chat.thinks)

        timeout = ClientTimeout(total=None)
        async with (
            ClientSession(timeout=timeout, raise_for_status=True) as session,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(answer(session, chat)) for chat in chats]
        return [task.result() for task in tasks]

    def _body(self, chat: Chat) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "temperature": 0,
            "messages": list(map(template_message, chat.messages)),
            "chat_template_kwargs": {"enable_thinking": chat.thinks},
        }
        if chat.tools:
            body["tools"] = [schema(tool) for tool in chat.tools]
        if chat.schema:
            form = {"name": "answer", "schema": json.loads(chat.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


class _Called(msgspec.Struct):
    function: Call


class _Answer(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Called] | None = None

    def plain(self) -> Message:
        calls = tuple(called.function for called in self.tool_calls or ())
        return Message("assistant", self.content or "", calls, self.reasoning_content or "")


class _Choice(msgspec.Struct):
    message: _Answer


class _Reply(msgspec.Struct):
    choices: list[_Choice]


def _turn(message: Message) -> ChatMessage:
    calls = tuple(
        MessageToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(message.calls)
    )
    return ChatMessage(role=message.role, content=message.content, tool_calls=calls)
