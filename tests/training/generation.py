"""Generation for the evaluation: with transformers, or by a running stack as its client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np
import torch
from aiohttp import ClientSession, ClientTimeout
from tests.training.dialogue import Call, Chat, Message, said, schema, template_message
from transformers import AutoTokenizer, LlamaForCausalLM

from antiphon.client import Client
from antiphon.config.worker import GrammarConfig
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.model_worker.batching.token_masks import words_count
from antiphon.model_worker.grammar.source import GrammarSource
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler, XgrammarMatcher
from antiphon.wire.sampling import Grammar, GrammarKind
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from antiphon.wire.generate import CompleteOptions


class Generate(Protocol):
    """Answers chats: one text per chat, in order. Each chat ends before an answer."""

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer greedily, with at most `tokens_max` tokens per chat, and by its schema if any."""
        ...


class LocalModel:
    """Answers with transformers, in this process: the reference for the served model."""

    def __init__(self, folder: Path, rows_max: int = 128) -> None:
        # transformers leaves these classes largely untyped; they are not used elsewhere.
        self._tokenizer = cast("Any", AutoTokenizer).from_pretrained(folder, padding_side="left")
        self._model = cast("Any", LlamaForCausalLM).from_pretrained(folder, dtype=torch.float32)
        self._rows_max = rows_max
        card = read_card(folder)
        vocabulary = read_vocabulary(folder, card.vocabulary_size)
        self._compiler = XgrammarCompiler(vocabulary, frozenset(card.eos_ids), GrammarConfig())

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer in batches of chats of similar length, so that padding stays small."""
        prompts = [self._prompt(chat) for chat in chats]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), self._rows_max):
            chosen = order[start : start + self._rows_max]
            schemas = [chats[index].schema for index in chosen]
            texts = self._batch([prompts[index] for index in chosen], schemas, tokens_max)
            for index, text in zip(chosen, texts, strict=True):
                answers[index] = text
        return answers

    def _prompt(self, chat: Chat) -> str:
        return self._tokenizer.apply_chat_template(
            [template_message(message) for message in chat.messages],
            tools=[schema(tool) for tool in chat.tools] or None,
            enable_thinking=chat.thinks,
            tokenize=False,
            add_generation_prompt=True,
        )

    def _batch(self, prompts: list[str], schemas: list[str], tokens_max: int) -> list[str]:
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            outputs = self._model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=tokens_max,
                do_sample=False,
                temperature=None,
                top_p=None,
                logits_processor=[self._held(schemas)] if any(schemas) else None,
            )
        new_ids = outputs[:, inputs.input_ids.shape[1] :]
        return self._tokenizer.batch_decode(new_ids, skip_special_tokens=True)

    def _held(self, schemas: list[str]) -> Held:
        compiled = {
            text: self._compiler.compile(GrammarSource(GrammarKind.JSON_SCHEMA, text))
            for text in set(schemas) - {""}
        }
        return Held([compiled[text].start(()) if text else None for text in schemas])


class Held:
    """Logits processor that applies the grammar of each sequence in a batch, for transformers."""

    def __init__(self, states: list[XgrammarMatcher | None]) -> None:
        self._states = states
        self._begun = False

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask tokens that are not allowed next. (B, T) ids so far, (B, V) scores -> (B, V)."""
        allowed = np.zeros(words_count(scores.shape[1]), np.int32)
        for row, state in enumerate(self._states):
            if state is None or state.terminated:
                continue
            if self._begun:
                state.accept(int(token_ids[row, -1]))
            if not state.terminated:
                state.fill(allowed)
                bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
                forbidden = torch.tensor(bits[: scores.shape[1]] == 0)
                scores[row, forbidden] = -torch.inf
        self._begun = True
        return scores


AT_ONCE = 16


@dataclass(frozen=True)
class ServedModel:
    """Generates over NATS, several chats at a time. Implements `Generate`."""

    nats_url: str
    model: str

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        return asyncio.run(self._answers(chats, tokens_max))

    async def _answers(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        async def answer(chat: Chat) -> str:
            options: CompleteOptions = {"temperature": 0.0, "max_tokens": tokens_max}
            options["chat_template_kwargs"] = json.dumps({"enable_thinking": chat.thinks})
            if chat.tools:
                options["tools"] = json.dumps([schema(tool) for tool in chat.tools])
            if chat.schema:
                options["grammar"] = Grammar(kind=GrammarKind.JSON_SCHEMA, text=chat.schema)
            turns = list(map(wire_message, chat.messages))
            return (await client.complete(self.model, turns, **options)).text

        async with Client(self.nats_url) as client:
            return await _each(answer, chats)


@dataclass(frozen=True)
class HttpModel:
    """Generates over HTTP with the OpenAI API. Implements `Generate`.

    The parsed answer is formatted again as the model wrote it: an answer that the gateway's parsers
    did not parse counts as wrong.
    """

    url: str
    model: str

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        return asyncio.run(self._answers(chats, tokens_max))

    async def _answers(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        async def answer(chat: Chat) -> str:
            body = self._body(chat) | {"max_tokens": tokens_max}
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
                completion = msgspec.json.decode(await reply.read(), type=_Reply)
            return said(completion.choices[0].message.plain(), thinks=chat.thinks)

        timeout = ClientTimeout(total=None)
        async with ClientSession(timeout=timeout, raise_for_status=True) as session:
            return await _each(answer, chats)

    def _body(self, chat: Chat) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
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


async def _each(answer: Callable[[Chat], Awaitable[str]], chats: Sequence[Chat]) -> list[str]:
    """Answer the chats, several at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(chat: Chat) -> str:
        async with slots:
            return await answer(chat)

    return await asyncio.gather(*map(one, chats))


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


def wire_message(message: Message) -> ChatMessage:
    calls = tuple(
        MessageToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(message.calls)
    )
    return ChatMessage(role=message.role, content=message.content, tool_calls=calls)
