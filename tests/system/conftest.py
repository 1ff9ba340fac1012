"""Stacks for all tests that leave them as they found them, and the client that most tests ask with.

A module that has a `stack` of its own gets clients of that one.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from tests.system.stack import Stack, serving

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path


QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
MARKS = ("<think>", "</think>")
GAP_MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
FILLING = {
    "name": "middle_between",
    "fim_begin_token": "<fim_prefix>",
    "fim_middle_token": "<fim_middle>",
    "fim_end_token": "<fim_suffix>",
    "fim_position": "MIDDLE",
}
_WEIGHTS = "model.safetensors"
_EMBEDDINGS = "model.embed_tokens.weight"
_ANSWER = "{% if add_generation_prompt %}<|assistant|>"
_THINKS = f"{_ANSWER}{{% if enable_thinking %}}{MARKS[0]}{{% endif %}}"


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


def make_thinker(folder: Path) -> None:
    """Write the model, which thinks where the template's `enable_thinking` is set."""
    _copy_with_tokens(folder, (*MARKS, *GAP_MARKS))

    def template(config: dict[str, Any]) -> None:
        assert _ANSWER in config["chat_template"]
        config["chat_template"] = config["chat_template"].replace(_ANSWER, _THINKS)

    _edit(folder / "tokenizer_config.json", template)


def _copy_with_tokens(folder: Path, tokens: Sequence[str]) -> None:
    """Write the embedded model with more tokens, which say nothing to it."""
    shutil.copytree(embedded.path(), folder, dirs_exist_ok=True)
    weights = load_file(folder / _WEIGHTS)
    rows = weights[_EMBEDDINGS]
    first_id = len(rows)
    weights[_EMBEDDINGS] = torch.cat([rows, rows.new_zeros(len(tokens), rows.shape[1])])
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})

    def tokenizer(config: dict[str, Any]) -> None:
        config["added_tokens"] += [
            config["added_tokens"][0] | {"id": first_id + n, "content": token, "special": False}
            for n, token in enumerate(tokens)
        ]

    _edit(folder / "config.json", lambda config: config.update(vocab_size=first_id + len(tokens)))
    _edit(folder / "tokenizer.json", tokenizer)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, ensure_ascii=False))
