"""Streams are resumed at any gateway: after a lost connection, and after the death of one."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.parse
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.system.cutting import in_thread, linked_stack
from tests.system.stack import Stack, module_stack, pages_in_use, second_gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

TOKENS = 400
WINDOW_S = 30
COUNT = {"max_tokens": TOKENS, "stream": True, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["numbers"],
        },
    },
}
QUESTION = [{"role": "user", "content": "Add all numbers from 1 to 40."}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", COUNT | {"prompt": "Count from 1:", "temperature": 0}),
    "two seeded choices, logprobs, usage": (
        "/v1/completions",
        COUNT
        | {"prompt": "Count from 7:", "temperature": 1, "seed": 7, "n": 2, "logprobs": 1}
        | {"stream_options": {"include_usage": True}},
    ),
    "chat": ("/v1/chat/completions", COUNT | {"messages": QUESTION, "seed": 3}),
    "tools": (
        "/v1/chat/completions",
        {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": TOKENS}
        | {"stream": True, "seed": 5},
    ),
    "generate, cumulative": (
        "/generate",
        {"text": "Count from 3:", "stream": True, "stream_interval": 5}
        | {"sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 4}},
    ),
}
CHOICES = len(BODIES) + 1
"""One of them has two."""

stack = module_stack("--enable-deterministic-inference")


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[str]:
    """The URL of a second gateway of the same cluster."""
    with second_gateway(stack) as url:
        yield url


@dataclass
class Output:
    """What a client has received, over all connections."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: defaultdict[int, list[object]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict[int, str])
    usage: object = None
    events: int = 0
    last_id: str = ""
    request_id: str = ""
    done: bool = False

    def add(self, data: str) -> None:
        self.events += 1
        if data == "[DONE]":
            assert not self.done
            self.done = True
            return
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        if "meta_info" in chunk:
            assert chunk["text"].startswith(self.texts[0])
            self.texts[0] = chunk["text"]
            self.usage = chunk["meta_info"]["completion_tokens"]
        for choice in chunk.get("choices", ()):
            self._choose(choice)

    def _choose(self, choice: Any) -> None:
        index, delta = choice["index"], choice.get("delta", {})
        self.texts[index] += choice.get("text") or delta.get("content") or ""
        self.texts[index] += delta.get("role", "")
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            self.calls[index] += (function.get("name") or "") + function["arguments"]
        if found := choice.get("logprobs"):
            self.logprobs[index] += found["token_logprobs"]
        if reason := choice.get("finish_reason"):
            assert index not in self.ends
            self.ends[index] = reason

    @property
    def content(self) -> tuple[object, ...]:
        return dict(self.texts), dict(self.calls), dict(self.logprobs), self.ends, self.usage


def read(
    output: Output,
    url: str,
    path: str,
    body: dict[str, Any],
    stop: Callable[[Output], bool] = lambda _: False,
) -> None:
    """Read a stream, or its rest, until it ends, its connection breaks, or `stop` says so."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json", "X-Antiphon-Resume": str(WINDOW_S)}
    if output.last_id or output.request_id:
        headers["Last-Event-ID"] = output.last_id or output.request_id
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        output.request_id = response.headers["X-Request-Id"]
        event_id = ""
        while line := response.readline():
            text = line.decode().rstrip("\n")
            if text.startswith("id: "):
                event_id = text.removeprefix("id: ")
            elif text.startswith("data: "):
                output.add(text.removeprefix("data: "))
                assert event_id != output.last_id
                output.last_id = event_id
                if output.done or stop(output):
                    return
    except (ConnectionError, http.client.HTTPException):
        pass
    finally:
        connection.close()


def whole(url: str, path: str, body: dict[str, Any]) -> Output:
    output = Output()
    read(output, url, path, body)
    assert output.done
    return output


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, Output]:
    """What a client receives over one connection."""
    with ThreadPoolExecutor(len(BODIES)) as asking:
        outputs = asking.map(lambda kind: whole(stack.url, *BODIES[kind]), BODIES)
        return dict(zip(BODIES, outputs, strict=True))


@pytest.mark.parametrize("kind", BODIES)
def test_streams_are_resumed_after_each_part_of_them(
    stack: Stack, other: str, expected: dict[str, Output], kind: str
) -> None:
    """The client leaves again and again, and comes back to the same gateway or the other one."""
    path, body = BODIES[kind]
    step = max(1, expected[kind].events // 8)
    output, urls = Output(), [stack.url, stack.url, other, stack.url, other, other]
    for turn in range(1000):
        until = output.events + (1 if turn < 4 else step)
        read(output, urls[turn % len(urls)], path, body, lambda at, n=until: at.events >= n)
        if output.done:
            break
    assert output.content == expected[kind].content
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")


def test_the_end_of_a_stream_is_received_again(stack: Stack, other: str) -> None:
    path, body = BODIES["two seeded choices, logprobs, usage"]
    expected = whole(stack.url, path, body | {"max_tokens": 12})
    for url in (stack.url, other):
        output = Output()
        read(output, stack.url, path, body | {"max_tokens": 12}, lambda at: at.usage is not None)
        read(output, url, path, body | {"max_tokens": 12})
        assert output.done
        assert output.content == expected.content


async def test_streams_survive_the_death_of_their_gateway(expected: dict[str, Output]) -> None:
    """It dies when all of them are open."""
    outputs = {kind: Output() for kind in BODIES}
    async with (
        linked_stack("--enable-deterministic-inference") as bed,
        in_thread(second_gateway(bed.stack)) as other,
    ):
        async with (
            bed.hitting(["gateway-0"], streams=len(BODIES), choices=CHOICES),
            asyncio.TaskGroup() as group,
        ):
            for kind, output in outputs.items():
                group.create_task(asyncio.to_thread(read, output, bed.stack.url, *BODIES[kind]))
        assert not any(output.done for output in outputs.values())
        for kind, output in outputs.items():
            await asyncio.to_thread(read, output, other, *BODIES[kind])
            assert output.done
            assert output.content == expected[kind].content, kind
        await asyncio.to_thread(
            wait_until, lambda: pages_in_use(bed.stack) == 0, 30, "no pages in use"
        )
