"""Stacks for all tests that leave them as they found them, and the client that most tests ask with.

A module that has a `stack` of its own gets clients of that one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from openai import AsyncOpenAI
from tests.system.stack import Stack, serving
from tests.system.thinker import FILLING, make_thinker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def json_stack() -> Iterator[Stack]:
    """The embedded model, whose calls are said to be in JSON."""
    with serving("--tool-call-parser", "json", "--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with marks of thinking, and of a gap to fill."""
    folder = tmp_path_factory.mktemp("thinker")
    make_thinker(folder)
    form = folder / "form.json"
    form.write_text(json.dumps(FILLING))
    reads = ("--reasoning-parser", "qwen3", "--completion-template", str(form))
    with serving("--model-path", str(folder), *reads) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
