"""Output that is larger than a message survives its worker, and ends with a reason beside it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import pytest
import pytest_asyncio
from openai import APIError, OpenAI
from tests.system.cutting import LinkedStack, linked_stack
from tests.system.stack import Stack, pages_in_use, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai.types.chat import ChatCompletionChunk

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

MESSAGE_BYTES = 144 * 1024
TOKENS = 1200
LARGE_TOKENS = 950
"""Of 168 bytes of token outputs each: more than a message takes."""
MARGIN = 50
"""Token outputs may come a few tokens after their text."""
DEADLINE_S = 60.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed() -> AsyncIterator[LinkedStack]:
    async with linked_stack(
        "--enable-deterministic-inference",
        *("--bus-payload-bytes-max", str(MESSAGE_BYTES)),
        *("--gateway-requests-max", "512"),
    ) as running:
        yield running


class Reader:
    """Streams an answer with the logprobs of many tokens."""

    def __init__(self, stack: Stack) -> None:
        self.tokens: list[tuple[str, float, int]] = []
        self.text = ""
        self.error: APIError | None = None
        self._stack = stack

    def read(self) -> Self:
        try:
            with OpenAI(base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.chat.completions.create(
                    model=self._stack.model,
                    messages=[{"role": "user", "content": "Count from 3 to 900."}],
                    max_tokens=TOKENS,
                    temperature=0,
                    logprobs=True,
                    top_logprobs=20,
                    stream=True,
                    timeout=DEADLINE_S,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    self._add(chunk)
        except APIError as error:
            self.error = error
        return self

    def _add(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            found = None if choice.logprobs is None else choice.logprobs.content
            for token in found or ():
                tops = len(token.top_logprobs)
                self.tokens.append((token.token, round(token.logprob, 4), tops))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(bed: LinkedStack) -> Reader:
    read = await asyncio.to_thread(Reader(bed.stack).read)
    assert (read.error, len(read.tokens)) == (None, TOKENS)
    return read


async def read_while(bed: LinkedStack, *victims: str) -> Reader:
    """Read an answer, of which `LARGE_TOKENS` have been sent as processes are killed."""
    await asyncio.to_thread(wait_until, bed.stack.healthy, 30, "healthy before the kill")
    async with bed.hitting(victims, streams=1, tokens=LARGE_TOKENS + MARGIN):
        found = await asyncio.to_thread(Reader(bed.stack).read)
    await asyncio.to_thread(wait_until, bed.stack.healthy, 30, "healthy after the kill")
    return found


async def test_output_that_is_larger_than_a_message_survives_its_worker(
    bed: LinkedStack, undisturbed: Reader
) -> None:
    """Its detokenizer keeps the logprobs: the next attempt has the same one."""
    found = await read_while(bed, "worker-0")
    assert found.error is None
    assert (found.text, found.tokens) == (undisturbed.text, undisturbed.tokens)


async def test_output_that_is_larger_than_a_message_and_lost_with_its_host_ends_with_both_sizes(
    bed: LinkedStack, undisturbed: Reader
) -> None:
    found = await read_while(bed, "worker-0", "detokenizer-0")
    assert found.error is not None
    assert found.error.code == "worker_lost"
    assert "too large to be continued elsewhere" in found.error.message
    assert f"the limit is {MESSAGE_BYTES} bytes" in found.error.message
    assert len(found.tokens) >= LARGE_TOKENS
    assert undisturbed.tokens[: len(found.tokens)] == found.tokens
    assert undisturbed.text.startswith(found.text)
    await asyncio.to_thread(wait_until, lambda: pages_in_use(bed.stack) == 0, 30, "no pages in use")
