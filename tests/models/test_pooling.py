"""Vectors of tiny random decoders, against transformers: the last hidden state, pooled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from tests.models import families
from tests.models.model_loop import CONTEXT_TOKENS, LINEAR, POOLED, PoolingEngine
from tests.models.parity import error, save, texts
from tests.models.specs import BY_NAME
from tests.models.stepper import prompts
from tests.models.tiny import VOCABULARY, write_llama
from torch.nn.functional import normalize
from transformers import AutoModel

from antiphon.model_card.pooling import PoolMode
from antiphon.wire.sampling import PoolParams, SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

LENGTHS = (1, 2, 23, 64, 65, 130)
PROMPTS = prompts(VOCABULARY, LENGTHS)
MODES = ("last", "cls", "mean")
FLAGS = {
    "last": "pooling_mode_lasttoken",
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
}
WIDTH = 48


def sentence(folder: Path, mode: str, *more: str) -> Path:
    """Add the files of sentence-transformers: a pooling, and modules that need no file."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({FLAGS[mode]: True}))
    types = ["Transformer", "Pooling", *more]
    modules = [
        {"idx": index, "path": f"{index}_{kind}" if index else "", "type": f"st.models.{kind}"}
        for index, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@torch.inference_mode()
def states(folder: Path, ids: Sequence[int]) -> Tensor:
    """The last hidden states of transformers, after the final norm."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([list(ids)])).last_hidden_state[0]


def check(ours: Sequence[np.ndarray], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for vector, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(vector), expected, rtol=2e-4, atol=2e-5 * float(expected.abs().max())
        )


@pytest.mark.parametrize("name", ["LlamaModel", "Qwen2Model", "Qwen3Model"])
@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str, mode: str) -> None:
    folder = sentence(save(BY_NAME[name], tmp_path).folder, mode)
    some = prompts(families.VOCABULARY, LENGTHS)
    theirs = [POOLED[mode](states(folder, ids)) for ids in some]
    check(PoolingEngine(folder).vectors_of(some), theirs)
    check(PoolingEngine(folder, chunk=16, batch=3).vectors_of(some), theirs)


@pytest.mark.parametrize("mode", MODES)
def test_few_pages_make_prompts_wait_and_change_no_vector(tmp_path: Path, mode: str) -> None:
    folder = sentence(write_llama(tmp_path / "model"), mode)
    some = PROMPTS * 3
    plenty = PoolingEngine(folder, chunk=16).vectors_of(some)
    few = PoolingEngine(folder, chunk=16, pages=40).vectors_of(some)
    check(few, [torch.tensor(vector) for vector in plenty])


def test_without_files_of_sentence_transformers_it_is_the_last_token_of_length_one(
    tmp_path: Path,
) -> None:
    folder = write_llama(tmp_path / "model")
    theirs = [normalize(states(folder, ids)[-1], dim=0) for ids in PROMPTS]
    check(PoolingEngine(folder).vectors_of(PROMPTS), theirs)


def test_a_module_normalises(tmp_path: Path) -> None:
    folder = sentence(write_llama(tmp_path / "model"), "mean", "Normalize")
    (vector,) = PoolingEngine(folder).vectors_of(PROMPTS[-1:])
    check([vector], [normalize(states(folder, PROMPTS[-1]).mean(dim=0), dim=0)])


def test_a_dense_module_comes_behind_the_pooling(tmp_path: Path) -> None:
    folder = sentence(write_llama(tmp_path / "model"), "mean", "Dense", "Normalize")
    torch.manual_seed(5)
    weight, bias = torch.randn(8, WIDTH), torch.randn(8)
    (folder / "2_Dense").mkdir()
    said = {"in_features": WIDTH, "out_features": 8, "activation_function": "torch.nn.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(said))
    tensors = {"linear.weight": weight, "linear.bias": bias}
    (folder / "2_Dense" / "model.safetensors").write_bytes(save_tensors(tensors))
    pooled = states(folder, PROMPTS[2]).mean(dim=0)
    expected = normalize(torch.tanh(weight @ pooled + bias), dim=0)
    check(PoolingEngine(folder).vectors_of(PROMPTS[2:3]), [expected])


def test_a_beginning_of_a_vector_has_length_one_too(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    params = PoolParams(dimensions=16)
    theirs = [normalize(states(folder, ids)[-1, :16], dim=0) for ids in PROMPTS]
    check(PoolingEngine(folder).vectors_of(PROMPTS, params), theirs)


def test_a_prompt_that_was_seen_is_found_in_the_cache_where_its_last_token_will_do(
    tmp_path: Path,
) -> None:
    folder = write_llama(tmp_path / "model")
    engine = PoolingEngine(folder, chunk=32)
    first = engine.vectors_of(PROMPTS[-1:])
    assert engine.cached_tokens == 0
    again = engine.vectors_of(PROMPTS[-1:])
    assert engine.cached_tokens == 128
    check(again, [torch.tensor(first[0])])


@pytest.mark.skipif(LINEAR == "plain", reason="the CPU's own kernels are not built")
@pytest.mark.parametrize("mode", MODES)
def test_a_deterministic_vector_has_its_bits_however_it_was_computed(
    tmp_path: Path, mode: str
) -> None:
    folder = sentence(write_llama(tmp_path / "model"), mode)
    alone = [PoolingEngine(folder, deterministic=True).vectors_of([ids])[0] for ids in PROMPTS]
    together = PoolingEngine(folder, chunk=12, batch=4, deterministic=True).vectors_of(PROMPTS)
    assert all(map(np.array_equal, alone, together))


@pytest.mark.skipif(LINEAR == "plain", reason="the CPU's own kernels are not built")
def test_a_deterministic_encoder_has_its_bits_whatever_is_beside_a_text(tmp_path: Path) -> None:
    folder = sentence(save(BY_NAME["BertModel"], tmp_path).folder, "mean")
    some = prompts(families.VOCABULARY, LENGTHS)
    alone = [PoolingEngine(folder, deterministic=True).vectors_of([ids])[0] for ids in some]
    together = PoolingEngine(folder, batch=4, deterministic=True).vectors_of(some)
    assert all(map(np.array_equal, alone, together))


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (SamplingParams(max_new_tokens=4), "does not generate"),
        (SamplingParams(max_new_tokens=4, pool=PoolParams()), "generates no tokens"),
        (
            SamplingParams(
                max_new_tokens=0, details=TokenOutputParams(ids=True), pool=PoolParams()
            ),
            "generates no tokens",
        ),
        (SamplingParams(max_new_tokens=0, pool=PoolParams(dimensions=WIDTH + 1)), "dimensions"),
    ],
)
def test_what_is_no_vector_is_refused(
    tmp_path: Path, sampling: SamplingParams, complaint: str
) -> None:
    engine = PoolingEngine(write_llama(tmp_path / "model"))
    assert not engine.vectors_of([[1, 2, 3]], sampling=sampling)
    (error,) = engine.errors.values()
    assert complaint in error.message
    assert not engine.vectors_of([[1] * (CONTEXT_TOKENS + 1)])
    assert len(engine.vectors_of([[1, 2, 3]])) == 1


def test_the_second_text_of_a_pair_has_another_type(tmp_path: Path) -> None:
    saved = save(BY_NAME["BertForSequenceClassification"], tmp_path)
    engine, ids = PoolingEngine(tmp_path), texts()[1]
    (alone,) = engine.vectors_of([ids])
    (pair,) = engine.vectors_of([ids], PoolParams(second_from=7))
    types = torch.tensor([[int(at >= 7) for at in range(len(ids))]])
    with torch.inference_mode():
        expected = saved.model(torch.tensor([ids]), token_type_ids=types).logits[0]
    assert error(torch.tensor(pair), expected) < 1e-3
    assert error(torch.tensor(alone), expected) > 1e-2


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("LlamaModel", PoolMode.LAST),
        ("BertModel", PoolMode.CLS),
        ("Gemma3TextModel that sees both ways", PoolMode.MEAN),
    ],
)
def test_without_pooling_files_a_family_pools_by_its_default(
    name: str, mode: PoolMode, tmp_path: Path
) -> None:
    assert PoolingEngine(save(BY_NAME[name], tmp_path).folder).pooling.mode is mode
