"""Which models and passes run as one call for all layers, and that it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS
from tests.models.stepper import Stepper, spy_on_logits
from tests.models.tiny import VOCABULARY, write_llama
from torch import Tensor

from antiphon.kernels.op import table
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.model.load import load
from antiphon.model_worker.runner.forward import Runner
from antiphon.model_worker.runner.memory import cache_groups

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

RANDOM = np.random.default_rng(9)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in (3, 50, 17, 90)]
SHAPES = {
    "grouped queries": {},
    "one kv head": {"num_key_value_heads": 1},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
}


def runner_of(folder: Path, *, linear: str = "packed", dtype: str = "bfloat16", **said) -> Runner:
    model = load(folder, dtype=dtype, linear=linear)
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=256)
    return Runner(model, groups, **said)


def stepper_of(runner: Runner) -> Stepper:
    return Stepper(runner, [pool.group for pool in runner.pools])


def written(runner: Runner) -> tuple[list[list[int]], list[Tensor]]:
    """Some requests in chunks and then side by side: what they say, and all logits."""
    seen = spy_on_logits(runner)
    batch = stepper_of(runner)
    for ids in PROMPTS:
        batch.add(ids)
    batch.prefill(20)
    batch.decode(12)
    return [line.ids for line in batch.lines.values()], seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=list(SHAPES))
def test_a_stack_has_the_bits_of_its_layers(tmp_path: Path, dtype: str, fields) -> None:
    folder = write_llama(tmp_path, fields)
    together = runner_of(folder, dtype=dtype)
    apart = runner_of(folder, dtype=dtype, fused=False)
    assert [runner.choices[0].backend for runner in (together, apart)] == ["cpu", "by layer"]
    ids, logits = written(together)
    expected_ids, expected = written(apart)
    assert ids == expected_ids
    assert len(logits) == len(expected)
    assert all(map(torch.equal, logits, expected))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"linear": "plain"}, "the linears are not packed"),
        ({"fused": False}, "layers are kept apart"),
        ({"forced": {"attention.paged": "torch"}}, "attention.paged runs on torch"),
        ({"dtype": "float16", "linear": "plain"}, "norm.rmsnorm runs on torch"),
    ],
    ids=["plain linears", "kept apart", "a forced operation", "float16"],
)
def test_the_table_says_why_layers_run_one_by_one(llama: Path, said, reason: str) -> None:
    shown = table(runner_of(llama, **said).choices).splitlines()[0]
    assert shown.startswith("decoder.stack")
    assert f"not cpu: {reason}" in shown


class OneLayerScaled:
    """Adapter a multiplies what one linear adds by 1 + a."""

    def add(self, linear: str, x: Tensor, y: Tensor, token_adapter: Tensor) -> Tensor:
        if linear != "model.layers.2.mlp.gate_up":
            return y
        return y * (1 + token_adapter.clamp(min=0))[:, None].to(y.dtype)


def test_a_pass_with_adapters_goes_layer_by_layer_and_the_next_does_not(llama: Path) -> None:
    plain = stepper_of(runner_of(llama))
    batch = stepper_of(runner_of(llama, adapters=OneLayerScaled()))
    for one in (plain, batch):
        one.add(PROMPTS[1])
        one.add(PROMPTS[1])
    batch.lines[1].adapter = 1
    for one in (plain, batch):
        one.prefill()
        one.decode(9)
        one.step({0: 1})
    assert batch.lines[0].ids == plain.lines[0].ids
    assert batch.lines[1].ids != plain.lines[1].ids


def test_a_row_that_is_not_finite_is_told_by_the_stack(llama: Path) -> None:
    runner = runner_of(llama)
    embedding = runner._model.own._embedding
    assert embedding is not None
    poison = PROMPTS[1][2]
    embedding._weights.tensors["weight"][poison] = torch.nan
    batch = stepper_of(runner)
    for ids in PROMPTS[:3]:
        batch.add([token if token != poison or ids is PROMPTS[1] else 0 for token in ids])
    batch.step({0: 3, 1: 40, 2: 17})
    assert [line.statuses for line in batch.lines.values()] == [
        [RowStatus.OK],
        [RowStatus.NON_FINITE],
        [RowStatus.OK],
    ]
