"""Answers the evaluation's prompts through a running stack, as a client hears them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.training.generation import Chat

AT_ONCE = 16


class ServedModel:
    """Asks over NATS, several chats at a time. Implements `Generate`."""

    def __init__(self, nats_url: str, model: str) -> None:
        self._nats_url = nats_url
        self._model = model

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer each chat greedily."""
        return asyncio.run(self._answers(chats, tokens_max))

    async def _answers(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def answer(client: Client, chat: Chat) -> str:
            turns = [(message.role, message.content) for message in chat]
            async with slots:
                said = await client.ask(self._model, turns, temperature=0.0, max_tokens=tokens_max)
            return said.text

        async with Client(self._nats_url) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(client, chat)) for chat in chats]
        return [task.result() for task in tasks]
