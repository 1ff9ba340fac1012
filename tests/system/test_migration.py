"""Processes that serve streams are killed: these go on, and say what they say without it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from openai import OpenAI
from tests.system.cutting import LinkedStack, linked_stack
from tests.system.stack import Stack, pages_in_use, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

STREAMS = 6
CHOICES = STREAMS + 1
"""One of the streams has two."""
TOKENS = 1800
DEADLINE_S = 60.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed() -> AsyncIterator[LinkedStack]:
    async with linked_stack("--enable-deterministic-inference") as running:
        yield running


class Reader(threading.Thread):
    """Streams completions: greedy, seeded, of two choices, with logprobs, and under a pattern."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self.texts = ["", ""]
        self.tokens: list[tuple[str, float]] = []
        self.usage = 0
        self.error: Exception | None = None
        self._stack = stack
        self._number = number

    def run(self) -> None:
        number = self._number
        try:
            with OpenAI(base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.completions.create(
                    model=self._stack.model,
                    prompt=f"Count from {number} to 900:",
                    max_tokens=TOKENS,
                    temperature=number % 2,
                    seed=number,
                    n=2 if number == 3 else 1,
                    logprobs=0 if number == 4 else None,
                    stream=True,
                    stream_options={"include_usage": True},
                    timeout=DEADLINE_S,
                    extra_body={"regex": r"([0-9]{1,3}, )+"} if number == 5 else IGNORE_EOS,
                )
                for chunk in stream:
                    if chunk.usage is not None:
                        self.usage = chunk.usage.completion_tokens
                    for choice in chunk.choices:
                        self.texts[choice.index] += choice.text
                        if (found := choice.logprobs) is not None:
                            pairs = zip(found.tokens or (), found.token_logprobs or (), strict=True)
                            self.tokens += [(token, round(value, 4)) for token, value in pairs]
        except Exception as error:  # noqa: BLE001  # whatever it is, the test names it
            self.error = error


IGNORE_EOS = {"ignore_eos": True}


def read(stack: Stack) -> list[tuple[object, ...]]:
    """What the clients read."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [(*reader.texts, reader.tokens, reader.usage) for reader in readers]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(bed: LinkedStack) -> list[tuple[object, ...]]:
    """What the clients read while nothing is killed."""
    return await asyncio.to_thread(read, bed.stack)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("worker-0",), id="worker", marks=pytest.mark.long),
        pytest.param(("detokenizer-0",), id="detokenizer", marks=pytest.mark.long),
        pytest.param(("worker-0", "detokenizer-0", "encoder-0", "kv_storage-0"), id="host"),
    ],
)
async def test_streams_survive_the_processes_that_serve_them(
    bed: LinkedStack, undisturbed: list[tuple[object, ...]], victims: tuple[str, ...]
) -> None:
    """After the death of a whole host, only the gateway has what was generated."""
    await asyncio.to_thread(wait_until, bed.stack.healthy, 30, "healthy before the kill")
    async with bed.hitting(victims, streams=STREAMS, choices=CHOICES, tokens=20 * CHOICES):
        assert await asyncio.to_thread(read, bed.stack) == undisturbed
    await asyncio.to_thread(wait_until, bed.stack.healthy, 30, f"healthy after {victims}")
    await asyncio.to_thread(wait_until, lambda: pages_in_use(bed.stack) == 0, 30, "no pages in use")
