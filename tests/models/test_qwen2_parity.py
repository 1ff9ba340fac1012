"""Qwen2 against transformers: biases on queries, keys and values, and windows in upper layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.models.specs import attention_of, windowed
from tests.models.test_llama_parity import (
    assert_close,
    logits_of,
    mutated,
    prompts,
    stepper,
)
from tests.models.tiny import write_qwen2
from tests.support.models import load, open_model

from antiphon.layers.methods import LinearMethod, unsupported_reason
from antiphon.layers.mlp import GatedMlpSpec

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.model_runner import OpenModel

LIMIT = 5e-5
"""Random biases of queries and keys make sharper attention, so errors grow more than in Llama."""
SHAPES: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "windows in upper layers": {"use_sliding_window": True, "sliding_window": 9},
    "windows by name": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "a window that is not used": {"sliding_window": 5},
}


def opened(folder: Path, linear: str) -> OpenModel:
    if lacks := unsupported_reason(LinearMethod(linear), torch.device("cpu"), torch.float32):
        pytest.skip(lacks)
    return open_model(folder, pages=256, dtype="float32", linear=linear)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("linear", ["plain", "packed"])
def test_greedy_text_and_logits_equal_transformers(
    tmp_path: Path, reference, shape: dict[str, object], linear: str
) -> None:
    folder = write_qwen2(tmp_path, shape)
    theirs, model = reference(folder), opened(folder, linear)
    batch = stepper(model, prompts())
    batch.prefill(chunk=21)
    batch.decode(24)
    for line, ids in zip(batch.lines.values(), prompts(), strict=True):
        assert line.ids[len(ids) :] == theirs.greedy_after(line.ids, len(ids))
    ids = prompts()[-1]
    assert_close(logits_of(opened(folder, linear), ids, chunk=31), theirs.logits(ids), LIMIT)


@pytest.mark.parametrize(
    ("windows", "shape"),
    [
        ((None,) * 4, {"use_sliding_window": True, "sliding_window": 60}),
        ((60, None, None, None), {}),
    ],
    ids=["no window", "a window"],
)
def test_parity_notices_a_mutant(tmp_path: Path, reference, windows, shape) -> None:
    folder = write_qwen2(tmp_path, shape)
    model = mutated(folder, windowed(load(folder).spec, windows))
    ids = prompts()[-1]
    with pytest.raises(AssertionError, match="standard deviations"):
        assert_close(logits_of(model, ids, chunk=90), reference(folder).logits(ids), LIMIT)


def test_only_queries_keys_and_values_have_a_bias(tmp_path: Path) -> None:
    for layer in load(write_qwen2(tmp_path)).spec.layers:
        mixer = attention_of(layer)
        assert isinstance(layer.feed_forward, GatedMlpSpec)
        assert (mixer.qkv_bias, mixer.out_bias, layer.feed_forward.bias) == (True, False, False)
