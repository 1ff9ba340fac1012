"""Processes that serve streams are killed: these go on, and say what they say without it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from openai import OpenAI
from tests.system.stack import Stack, module_stack, pages_in_use, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STREAMS = 6
TOKENS = 1800
DEADLINE_S = 60.0

stack = module_stack("--enable-deterministic-inference")


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


def read(stack: Stack, victims: tuple[str, ...] = ()) -> list[tuple[object, ...]]:
    """What the clients read while processes are killed with their first words out."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    if victims:
        wait_until(lambda: all(reader.texts[0] for reader in readers), 30, "the first words")
        pids = [pid for name in victims if (pid := stack.pid(name)) is not None]
        assert len(pids) == len(victims)
        unread = [reader.is_alive() for reader in readers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all(unread), "they had ended before the kill"
    for reader in readers:
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [(*reader.texts, reader.tokens, reader.usage) for reader in readers]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[tuple[object, ...]]:
    """What the clients read while nothing is killed."""
    return read(stack)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("worker-0",), id="worker", marks=pytest.mark.long),
        pytest.param(("detokenizer-0",), id="detokenizer", marks=pytest.mark.long),
        pytest.param(("worker-0", "detokenizer-0", "encoder-0", "kv_storage-0"), id="host"),
    ],
)
def test_streams_survive_the_processes_that_serve_them(
    stack: Stack, undisturbed: list[tuple[object, ...]], victims: tuple[str, ...]
) -> None:
    """After the death of a whole host, only the gateway has what was generated."""
    assert read(stack, victims) == undisturbed
    wait_until(stack.healthy, 30, f"healthy after {victims}")
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")
