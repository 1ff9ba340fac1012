"""NATS clients resume: after their own connection was lost, and after the death of a gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.nats_link import linked
from tests.support.wait import until
from tests.system.stack import Stack, module_stack, pages_in_use, second_gateway, wait_until

from antiphon.client import Client
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.token_outputs import TokenOutputsChunk, join_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.generate import GenerateOptions

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

TOKENS = 600
TOKENS_MAX = 1900
"""About as many as the model's context has: they take longer than a client may be away."""
QUESTION = "Add all numbers from 1 to 40."
COUNT: GenerateOptions = {"max_tokens": TOKENS, "ignore_eos": True, "resume_s": 30.0}
KINDS: dict[str, GenerateOptions] = {
    "greedy": {**COUNT, "temperature": 0.0},
    "seeded": {**COUNT, "temperature": 1.0, "seed": 5},
    "two choices": {**COUNT, "temperature": 1.0, "seed": 7, "n": 2},
    "logprobs": {
        **COUNT,
        "temperature": 0.8,
        "seed": 3,
        "details": TokenOutputParams(logprobs=True, top=2, prompt_start=0),
    },
}

stack = module_stack("--enable-deterministic-inference")


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[str]:
    with second_gateway(stack) as url:
        yield url


@dataclass
class Output:
    """What one client has received."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    details: list[TokenOutputsChunk | None] = field(default_factory=list)
    chunks: int = 0
    ended: bool = False

    @property
    def content(self) -> tuple[object, ...]:
        return dict(self.texts), join_chunks(self.details)


async def read(client: Client, model: str, kind: str, output: Output, tokens: int = TOKENS) -> None:
    options: GenerateOptions = {**KINDS[kind], "max_tokens": tokens}
    async for chunk in client.generate(model, QUESTION, timeout_s=120, **options):
        output.texts[chunk.choice] += chunk.text
        output.details.append(chunk.details)
        output.chunks += 1
    output.ended = True


async def whole(stack: Stack, tokens: int = TOKENS) -> dict[str, Output]:
    outputs = {kind: Output() for kind in KINDS}
    async with Client(stack.nats_url) as client, asyncio.TaskGroup() as group:
        for kind, output in outputs.items():
            group.create_task(read(client, stack.model, kind, output, tokens))
    return outputs


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, Output]:
    """What clients receive whose connections and gateways live."""
    return asyncio.run(whole(stack))


def gone(stack: Stack) -> int:
    """How many clients the gateways have given up."""
    logs = [stack.log("gateway-0"), stack.log("gateway-1")]
    return sum(log.count("client is gone") for log in logs)


def body(kind: str) -> dict[str, Any]:
    """The same request over HTTP."""
    options: dict[str, Any] = dict(KINDS[kind])
    options = {name: options[name] for name in options if name not in ("resume_s", "details")}
    return options | {"messages": [{"role": "user", "content": QUESTION}]}


def test_output_is_that_of_http(stack: Stack, expected: dict[str, Output]) -> None:
    with ThreadPoolExecutor(len(KINDS)) as asking:
        answers = asking.map(lambda kind: stack.post("/v1/chat/completions", body(kind)), expected)
        for (kind, output), answer in zip(expected.items(), answers, strict=True):
            texts = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
            assert dict(output.texts) == texts, kind


async def test_responses_survive_a_lost_connection(stack: Stack, other: str) -> None:
    """The gateways give the client up while it is away, and keep its responses."""
    expected = await whole(stack, TOKENS_MAX)
    outputs, before = [(kind, Output()) for kind in KINDS for _ in range(2)], gone(stack)
    async with (
        linked(stack.nats_url) as link,
        Client(link.url) as client,
        asyncio.TaskGroup() as group,
    ):
        for kind, output in outputs:
            group.create_task(read(client, stack.model, kind, output, TOKENS_MAX))
        await until(lambda: all(output.chunks > 3 for _, output in outputs), timeout_s=30)
        link.cut()
        await until(lambda: gone(stack) > before, timeout_s=30)
        link.up = True
    for kind, output in outputs:
        assert output.content == expected[kind].content, kind
    await asyncio.to_thread(wait_until, lambda: pages_in_use(stack) == 0, 30, "no pages in use")


async def test_responses_survive_the_death_of_their_gateway(
    stack: Stack, other: str, expected: dict[str, Output]
) -> None:
    outputs = [(kind, Output()) for kind in KINDS for _ in range(2)]
    adopted = stack.log("scheduler-0").count("request adopted")
    async with Client(stack.nats_url) as client, asyncio.TaskGroup() as group:
        for kind, output in outputs:
            group.create_task(read(client, stack.model, kind, output))
        await until(lambda: all(output.chunks > 3 for _, output in outputs), timeout_s=30)
        gateway = stack.pid("gateway-0")
        assert gateway is not None
        os.kill(gateway, signal.SIGKILL)
    for kind, output in outputs:
        assert output.content == expected[kind].content, kind
    assert stack.log("scheduler-0").count("request adopted") > adopted
    await asyncio.to_thread(wait_until, lambda: pages_in_use(stack) == 0, 30, "no pages in use")
