"""Clients that stream requests of many kinds, what they read, and when.

What a request says follows from its number alone: a stack in deterministic mode says the same with
and without a fault, whatever else runs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.system.stack import Stack

TIMEOUT = aiohttp.ClientTimeout(total=120.0)
PROMPTS = ("short ", "A sentence that makes the prompt of this request a long one. ")
PROMPT_WORDS = (8, 60)
"""Repetitions of these, for prompts of about 128 and 1,500 tokens."""
AGAIN_S = 0.05
"""Between a request that failed and the next one."""
AGAIN_MAX_S = 1.0
"""The same at most after a refusal that says when to ask again."""
NOT_TAKEN = aiohttp.ClientConnectorError.__name__
"""No gateway listens: it has taken no request that it could lose, and is asked again."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1, "ignore_eos": True},
    "grammar": {"temperature": 1, "regex": r"([0-9]{1,3}, )+"},
    "choices": {"temperature": 1, "ignore_eos": True, "n": 2},
    "tools": {"temperature": 1, "tools": [WEATHER], "tool_choice": "required"},
}


def path_and_body(model: str, number: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """The request of this number, for so many tokens; odd ones have long prompts."""
    kind = tuple(KINDS)[number // 2 % len(KINDS)]
    long = number % 2
    prompt = f"Request {number}. " + PROMPTS[long] * PROMPT_WORDS[long]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[kind],
    }
    if kind == "tools":
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", body | {"prompt": prompt}


@dataclass
class Answer:
    """What was read of one request, and when each piece of it came, on the monotonic clock."""

    number: int
    began_s: float
    said: dict[int, str] = field(default_factory=dict[int, str])
    """By choice: its text, or the arguments of its tool calls."""
    finishes: dict[int, str] = field(default_factory=dict[int, str])
    usage: tuple[int, int] | None = None
    error: str | None = None
    """The code of an error, or the kind of a broken connection; None: it is complete."""
    arrivals_s: list[float] = field(default_factory=list[float])
    """But for that of a chat's role, which is sent when its request is accepted."""
    ended_s: float = 0.0
    again_s: float | None = None
    """Of one that was refused before it was taken, when it may be asked again, as it says."""
    request_id: str = ""
    """As its pieces give it."""

    @property
    def is_open(self) -> bool:
        """Whether some of it has come, and not its end."""
        return bool(self.arrivals_s) and self.usage is None and self.error is None

    @property
    def content(self) -> tuple[object, ...]:
        return self.said, self.finishes, self.usage

    def is_beginning_of(self, other: Answer) -> bool:
        return all(
            other.said.get(choice, "").startswith(text) for choice, text in self.said.items()
        )

    @property
    def first_s(self) -> float:
        """How long it took until something of it came, or until it ended without."""
        return (self.arrivals_s[0] if self.arrivals_s else self.ended_s) - self.began_s

    def gaps_s(self, first_s: float, last_s: float) -> list[float]:
        """The times without a piece, after the first one, that touch this span."""
        return [b - a for a, b in pairwise(self.arrivals_s) if b >= first_s and a <= last_s]

    def gaps_within_s(self, first_s: float, last_s: float) -> list[float]:
        """The times without a piece that lie in this span."""
        return [b - a for a, b in pairwise(self.arrivals_s) if a >= first_s and b <= last_s]

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a piece of the stream."""
        if not any("role" in choice.get("delta", ()) for choice in chunk.get("choices", ())):
            self.arrivals_s.append(time.monotonic())
        if (error := chunk.get("error")) is not None:
            self.error = str(error.get("code") or error.get("type"))
            return
        self.request_id = chunk["id"]
        if (usage := chunk.get("usage")) is not None:
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta")
            text = choice.get("text") or ""
            if delta is not None:
                calls = delta.get("tool_calls") or ()
                text = (delta.get("content") or "") + "".join(
                    (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                    for call in calls
                )
            self.said[index] = self.said.get(index, "") + text
            if (finish := choice.get("finish_reason")) is not None:
                self.finishes[index] = finish


async def read(session: aiohttp.ClientSession, stack: Stack, answer: Answer, tokens: int) -> None:
    """Stream one request for so many tokens to its end, or to what ends it."""
    path, body = path_and_body(stack.model, answer.number, tokens)
    try:
        async with session.post(stack.url + path, json=body) as response:
            if response.status != 200:
                refusal = msgspec.json.decode(await response.read())
                answer.error = str(refusal["error"].get("code") or response.status)
                if response.status == 503 and (after := response.headers.get("Retry-After")):
                    answer.again_s = min(float(after), AGAIN_MAX_S)
                return
            done = False
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.take(msgspec.json.decode(line[6:]))
                done = done or line.startswith(b"data: [DONE]")
            if not done and answer.error is None:
                answer.error = "cut"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = type(error).__name__
    finally:
        answer.ended_s = time.monotonic()


class Load:
    """So many clients, each of which streams one request after the other while this is entered,
    for so many tokens each.

    Attributes:
        answers: By client, in order; the last one may still be read.
        refused: Requests that were refused before they were taken, and asked again.
    """

    def __init__(self, stack: Stack, clients: int, tokens: int) -> None:
        self.answers: list[list[Answer]] = [[] for _ in range(clients)]
        self.refused = 0
        self._stack = stack
        self._tokens = tokens
        self._ending = False
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for client, answers in enumerate(self.answers):
            self._group.create_task(self._run(client, answers))
        return self

    async def __aexit__(self, *error: object) -> None:
        """Let every client end the request that it streams."""
        self._ending = True
        await self._group.__aexit__(None, None, None)

    async def _run(self, number: int, answers: list[Answer]) -> None:
        # A connection each: one that a gateway's death has closed fails its own request alone.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:
            while not self._ending:
                answers.append(Answer(number, time.monotonic()))
                await read(session, self._stack, answers[-1], self._tokens)
                again_s = answers[-1].again_s
                if answers[-1].error is not None:
                    await asyncio.sleep(again_s or AGAIN_S)
                if again_s is not None or answers[-1].error == NOT_TAKEN:
                    self.refused += again_s is not None
                    answers.pop()
                else:
                    number += len(self.answers)


async def ask_all(stack: Stack, numbers: list[int], at_once: int, tokens: int) -> dict[int, Answer]:
    """The answers to these requests, so many at once."""
    waiting, answers = list(reversed(numbers)), dict[int, Answer]()

    async def client(session: aiohttp.ClientSession) -> None:
        while waiting:
            answer = Answer(waiting.pop(), time.monotonic())
            await read(session, stack, answer, tokens)
            answers[answer.number] = answer

    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client(session))
    return answers
