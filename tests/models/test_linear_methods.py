"""A model gives the same however its linears are stored, as far as its weights are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.stepper import logits_of, prompts, stepper
from tests.models.test_llama_parity import assert_close
from tests.models.tiny import write_llama
from tests.support.models import load, open_model

from antiphon.kernels.cpu.linear import quantize
from antiphon.layers.methods import LinearMethod, unsupported_reason
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.opening import OpenModel

CPU = torch.device("cpu")
LACKING = unsupported_reason(LinearMethod.PACKED, CPU, torch.float32)
pytestmark = pytest.mark.skipif(bool(LACKING), reason=str(LACKING))

SHAPES: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def opened(folder: Path, linear: str, dtype: str = "float32") -> OpenModel:
    return open_model(folder, pages=256, dtype=dtype, linear=linear)


def round_weights(folder: Path, *, tied: bool) -> None:
    """Write what the int8 formats make of a checkpoint's linears, as floats."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            table = name == "model.embed_tokens.weight" and not tied
            if tensor.dim() == 2 and not table:
                steps, scales = quantize(tensor)
                tensors[name] = steps * scales[:, None]
        save_file(tensors, file)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_int8_gives_the_logits_of_its_rounded_weights(
    tmp_path: Path, shape: dict[str, object]
) -> None:
    folder = write_llama(tmp_path, shape)
    ids = prompts()[-1]
    ours = logits_of(opened(folder, "int8"), ids, chunk=31)
    round_weights(folder, tied="tie_word_embeddings" in shape)
    assert_close(ours, logits_of(opened(folder, "plain"), ids, chunk=90))


def test_rounding_activations_too_stays_near(llama: Path) -> None:
    ids = prompts()[-1]
    plain = logits_of(opened(llama, "plain"), ids, chunk=90)
    rounded = logits_of(opened(llama, "int8_dynamic"), ids, chunk=90)
    assert 0 < float((rounded - plain).std() / plain.std()) < 0.1


@pytest.mark.parametrize("linear", LinearMethod)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_is_decoded_with_every_way_to_keep_weights(
    llama: Path, linear: str, dtype: str
) -> None:
    batch = stepper(opened(llama, linear, dtype), prompts())
    batch.prefill(chunk=20)
    batch.decode(8)
    for line, ids in zip(batch.lines.values(), prompts(), strict=True):
        assert len(line.ids) >= len(ids) + 8


def test_a_tied_table_is_kept_once(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"tie_word_embeddings": True})
    model = opened(folder, "packed", "bfloat16")
    ids = prompts()[3]
    plain = logits_of(opened(folder, "plain", "bfloat16"), ids, chunk=16)
    assert float((logits_of(model, ids, chunk=16) - plain).std() / plain.std()) < 0.02


def test_what_the_kernels_do_not_compute_in_is_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'packed' here: .* float16"):
        load(llama, dtype="float16", linear="packed")
    assert load(llama, dtype="float16", linear="plain").build.dtype is torch.float16
