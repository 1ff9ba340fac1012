"""Output that is larger than a message survives its worker, and ends with a reason beside it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Self

import pytest
from openai import APIError, OpenAI
from tests.system.stack import Stack, module_stack, pages_in_use, wait_until

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MESSAGE_BYTES = 144 * 1024
TOKENS = 1800
LARGE_TOKENS = 950
"""Of 168 bytes of token outputs each: more than a message takes."""
DEADLINE_S = 60.0

stack = module_stack(
    "--enable-deterministic-inference",
    "--bus-payload-bytes-max",
    str(MESSAGE_BYTES),
    "--gateway-requests-max",
    "512",
)


class Reader:
    """Streams an answer with the logprobs of many tokens, and kills processes while it does."""

    def __init__(self, stack: Stack) -> None:
        self.tokens: list[tuple[str, float, int]] = []
        self.text = ""
        self.error: APIError | None = None
        self._stack = stack

    def read(self, victims: tuple[str, ...] = ()) -> Self:
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
                    if len(self.tokens) >= LARGE_TOKENS:
                        self._kill(victims)
                        victims = ()
        except APIError as error:
            self.error = error
        assert not victims, f"an answer of {len(self.tokens)} tokens is too short"
        return self

    def _add(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            found = None if choice.logprobs is None else choice.logprobs.content
            for token in found or ():
                tops = len(token.top_logprobs)
                self.tokens.append((token.token, round(token.logprob, 4), tops))

    def _kill(self, victims: tuple[str, ...]) -> None:
        pids = [pid for name in victims if (pid := self._stack.pid(name)) is not None]
        assert len(pids) == len(victims)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> Reader:
    read = Reader(stack).read()
    assert (read.error, len(read.tokens)) == (None, TOKENS)
    return read


def test_output_that_is_larger_than_a_message_survives_its_worker(
    stack: Stack, undisturbed: Reader
) -> None:
    """Its detokenizer keeps the logprobs: the next attempt has the same one."""
    found = Reader(stack).read(("worker-0",))
    assert found.error is None
    assert (found.text, found.tokens) == (undisturbed.text, undisturbed.tokens)
    wait_until(stack.healthy, 30, "healthy after the kill")


def test_output_that_is_larger_than_a_message_and_lost_with_its_host_ends_with_both_sizes(
    stack: Stack, undisturbed: Reader
) -> None:
    wait_until(stack.healthy, 30, "healthy before the kill")
    found = Reader(stack).read(("worker-0", "detokenizer-0"))
    assert found.error is not None
    assert found.error.code == "worker_lost"
    assert "too large to be continued elsewhere" in found.error.message
    assert f"the limit is {MESSAGE_BYTES} bytes" in found.error.message
    assert len(found.tokens) >= LARGE_TOKENS
    assert undisturbed.tokens[: len(found.tokens)] == found.tokens
    assert undisturbed.text.startswith(found.text)
    wait_until(stack.healthy, 30, "healthy after the kill")
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")
