"""The first turn of a client on a real model, which reads the prompts of coding agents slowly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.clients.programs import running_on_loopback
from tests.clients.relay import relay_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.clients.relay import Exchange, Relay
    from tests.system.stack import Stack

TURN_S = 600
HEADERS_S = 1.0
SILENCE_S = 11.0
"""A comment or a ping comes each 10 s where nothing else does."""


async def first_turn(
    engine: Stack,
    client: Callable[[str], tuple[list[str], dict[str, str]]],
    path: str,
    folder: Path,
) -> Exchange:
    """Run a client until the first answer from `path` has come whole; return that answer.

    Raises:
        AssertionError: The answer is an error, or its client had to wait too long for a sign.
    """
    async with relay_to(engine.url) as relay:
        command, environment = client(relay.url)
        with running_on_loopback(command, folder=folder, environment=environment):
            return await answered_in_time(relay, path)


async def answered_in_time(relay: Relay, path: str) -> Exchange:
    """Wait for the first answer from `path` that comes whole; return it.

    One that is not a stream has its headers when it is ready.

    Raises:
        AssertionError: The answer is an error, or its client had to wait too long for a sign.
    """
    async with asyncio.timeout(TURN_S):
        first = await relay.answer(path)
    assert first.status == 200, first.body.decode()
    if first.content_type == "application/json":
        return first
    assert first.headers_s < HEADERS_S, f"the headers came after {first.headers_s:.1f} s"
    assert first.silence_max_s < SILENCE_S, f"{first.silence_max_s:.1f} s without a sign"
    return first
