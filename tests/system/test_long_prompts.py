"""A prompt that is too long for messages stays at its gateway, and survives worker and leader."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.system.cutting import LinkedStack, in_thread, linked_stack
from tests.system.stack import Stack, pages_in_use, wait_until

from antiphon.wire.codec import decode
from antiphon.wire.command import Admit, CommandBatch
from antiphon.wire.submit import SubmitRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MESSAGE_BYTES = 20 * 1024
"""A prompt of more than a quarter of it is not sent."""
PROMPT = [100 + number % 50 for number in range(1300)]
TOKENS = 700

KILLED_AT = 50
"""Tokens that are out when the worker and the leader die."""


@pytest.fixture
async def bed() -> AsyncIterator[LinkedStack]:
    async with linked_stack(
        "--enable-deterministic-inference",
        *("--bus-payload-bytes-max", str(MESSAGE_BYTES)),
        *("--gateway-requests-max", "16"),
        *("--batching-running-max", "4"),
        *("--queue-waiting-max", "4"),
    ) as running:
        yield running


class Sizes:
    """Reads the payloads of submits and commands from the broker, beside their receivers."""

    def __init__(self, url: str) -> None:
        self.submits: list[bytes] = []
        self.commands: list[bytes] = []
        self._url = url
        self._ready, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        host, port = self._url.removeprefix("nats://").rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(0.1)
            connection.sendall(
                b'CONNECT {"verbose":false}\r\nSUB *.v1.scheduler.*.submit 1\r\n'
                b"SUB *.v1.worker.*.command 2\r\nPING\r\n"
            )
            data = b""
            while not self._done.is_set():
                try:
                    data += connection.recv(1 << 16)
                except TimeoutError:
                    continue
                data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        while b"\r\n" in data:
            line, rest = data.split(b"\r\n", 1)
            if line == b"PONG":
                self._ready.set()
            elif line.startswith((b"MSG", b"HMSG")):
                size = int(line.split()[-1])
                if len(rest) < size + 2:
                    return data
                into = self.submits if line.split()[2] == b"1" else self.commands
                into.append(rest[:size])
                rest = rest[size + 2 :]
            data = rest
        return data


def events(stack: Stack) -> Iterator[dict[str, Any]]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def read(stack: Stack) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for last in events(stack):
        assert "error" not in last, last
    return last


async def test_long_prompt_survives_worker_and_leader_and_is_never_sent(bed: LinkedStack) -> None:
    stack = bed.stack
    whole = await asyncio.to_thread(read, stack)
    assert whole["meta_info"]["prompt_tokens"] == len(PROMPT)
    async with (
        in_thread(Sizes(stack.nats_url)) as sizes,
        bed.hitting(["scheduler-0", "worker-0"], streams=1, tokens=KILLED_AT),
    ):
        found = await asyncio.to_thread(read, stack)
    assert found["text"] == whole["text"]
    assert found["output_ids"] == whole["output_ids"]
    submits = [decode(payload, (SubmitRequest,)) for payload in sizes.submits]
    admits = [
        command
        for payload in sizes.commands
        for command in decode(payload, (CommandBatch,)).commands
        if isinstance(command, Admit)
    ]
    assert len(submits) >= 2, "it is submitted again to the next leader"
    assert len(admits) >= 2, "it is admitted again by the next worker"
    assert all(one.prompt is not None and not one.prompt_ids for one in submits)
    assert max(map(len, sizes.submits + sizes.commands)) < 4 * len(PROMPT)
    await asyncio.to_thread(wait_until, stack.healthy, 30, "healthy after the kills")
    await asyncio.to_thread(wait_until, lambda: pages_in_use(stack) == 0, 30, "no pages in use")
    assert "antiphon_media_bytes 0.0" in await asyncio.to_thread(stack.get, "/metrics")
