"""The embedded model with marks: of thinking, which its template writes, and of a gap to fill."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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
