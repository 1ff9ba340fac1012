"""Real clients, pinned and unmodified, against real services whose worker answers from a script."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.bench.services import echo_stack
from tests.support.nats import NatsServer
from tests.support.scripted_worker import CONTEXT_TOKENS, read_prompts, write_script
from tests.system.stack import Stack, serving

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "antiphon-small"


@dataclass(frozen=True)
class ScriptedStack:
    """Services that answer at `url`, and the folder whose script their worker follows."""

    url: str
    folder: Path

    def script(self, *rules: tuple[str, str]) -> None:
        """Give each prompt that contains the first text the second as its answer; first fit."""
        write_script(self.folder, *rules)

    def prompts(self) -> list[str]:
        return read_prompts(self.folder)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedStack]:
    folder = tmp_path_factory.mktemp("scripted") / MODEL
    shutil.copytree(
        embedded.path(), folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md")
    )
    settings = {
        "cluster": {"model": MODEL},
        "model": {"path": str(folder), "context_tokens": CONTEXT_TOKENS},
        "load": {"config_overrides": f'{{"max_position_embeddings": {CONTEXT_TOKENS}}}'},
    }
    nats = NatsServer(durable=True)
    with asyncio.Runner() as runner:
        runner.run(nats.start())
        try:
            with echo_stack(
                nats.url, worker="tests.support.scripted_worker", settings=settings
            ) as running:
                yield ScriptedStack(running.url, folder)
        finally:
            runner.run(nats.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def engine() -> Iterator[Stack]:
    """The embedded model, with room for the long prompts of coding agents."""
    room = f'{{"max_position_embeddings": {CONTEXT_TOKENS}}}'
    limit = '{"max_new_tokens": 64}'
    with serving(
        "--json-model-override-args", room, "--preferred-sampling-params", limit
    ) as running:
        yield running


def thinking_call(name: str, arguments: dict[str, object]) -> str:
    return f"<think>A tool will say.</think>{call(name, arguments)}"


def call(name: str, arguments: dict[str, object]) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"
