"""Whatever is asked of a worker on a GPU, what it launches was compiled ahead of time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.dry_run import (
    GRAPH_SIZES,
    PAGE_TOKENS,
    SAMPLED,
    Launch,
    every_launch,
    in_groups,
    loop_of,
    open_worker,
    recording,
    request,
    worker_launches,
)
from tests.kernels.no_data import empty
from tests.kernels.published import MODELS, Sizes

from antiphon.config.load import load
from antiphon.config.model import Dtype, LinearFormat, LoadFormat
from antiphon.kernels.experts import ExpertSlice, ExpertWeights, PlainMatrix
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.resolve.device import HostDevice
from antiphon.resolve.resolved_config import resolve

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = "Llama-3.1-8B"
LATENT = Sizes(
    hidden=256,
    width=256,
    heads=(4, 4, 48),
    vocabulary=300,
    layers=2,
    fields={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
)
"""Of DeepSeek-V3's shape."""


def test_the_dry_run_has_the_defaults_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[LLAMA].config(32)))
    card = read_card(find_files(tmp_path, LoadFormat.DUMMY))
    environ = {"ANTIPHON_MODEL__DEVICE": "cuda", "ANTIPHON_BATCHING__RUNNING_MAX": "256"}
    gpu = HostDevice(kind="cuda", cores=8, memory_bytes=80 << 30, lacking="it is a GPU")
    plan = resolve(load(environ=environ).settings, card, gpu)
    assert (plan.dtype.value, plan.linear.value) == (Dtype.BFLOAT16, LinearFormat.PLAIN)
    assert (plan.page_tokens.value, plan.graph_sizes.value) == (PAGE_TOKENS, GRAPH_SIZES)


def launched(name: str, seed: int = 0, requests: int = 24, **changes: int) -> set[Launch]:
    """What a worker launches for requests of any length that come one after the other."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(0, np.log(20_000), requests)).astype(int).tolist()
    ways = random.integers(len(SAMPLED), size=requests).tolist()
    counts = random.integers(1, 9, requests).tolist()
    with recording() as found:
        sizes = MODELS[name]
        model = open_worker(sizes.config(3), rows=48, ranks=sizes.ranks, **changes)
        assert isinstance(model.runner, DeviceRunner)
        model.runner.capture((1, 3, 20))
        model.runner.capture_prefills((7, 64, 300))
        loop = loop_of(model, running_max=48, step_tokens_max=2048, chunk_tokens=512)
        asked = [
            request(length, SAMPLED[way], new_tokens)
            for length, way, new_tokens in zip(lengths, ways, counts, strict=True)
        ]
        ran = loop.run(asked, one_a_turn=True)
    assert [len(output.ids) for output in ran] == [each.sampling.max_new_tokens for each in asked]
    return set(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_worker_launches_what_was_compiled(name: str) -> None:
    found = launched(name)
    attention = {"heads_kernel", "paged_attention_kernel"}
    assert {each.kernel for each in found} >= {
        *({"store_kernel", "latent_kernel"} if MODELS[name].latent else attention),
        *("rmsnorm_kernel", "merge_kernel"),
        *("finite_kernel", "decode_rows_kernel", "resolve_kernel", "record_kernel"),
        *("argmax_kernel", "candidates_kernel", "penalize_kernel", "bias_kernel", "mask_kernel"),
    }
    assert not found - set(every_launch())


def test_latents_of_a_checkpoint_in_groups_are_read_back_on_the_device() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    found = worker_launches(LATENT.config(2), **in_groups(awq))
    assert {each.kernel for each in found} >= {"multiply_kernel", "latent_kernel", "down_kernel"}


def test_pages_of_another_size_were_not_compiled() -> None:
    unknown = launched(LLAMA, requests=3, page_tokens=16, pages=4000) - set(every_launch())
    kernels = {each.kernel for each in unknown}
    assert kernels == {"heads_kernel", "paged_attention_kernel", "decode_rows_kernel"}


def test_a_slice_of_experts_has_tiles_by_the_number_of_all() -> None:
    """520 pairs are many for 32 experts, and few where these are a rank's of 256."""
    ops = select(DeviceCapability("cuda", torch.bfloat16))
    weights = ExpertWeights(PlainMatrix(empty(32, 128, 64)), PlainMatrix(empty(32, 64, 64)))
    chosen, shares = empty(65, 8, dtype=torch.int64), empty(65, 8, dtype=torch.float32)
    pairs: list[object] = []
    for own in (None, ExpertSlice(0, 256)):
        with recording() as found:
            ops.experts(empty(65, 64), chosen, shares, weights, "silu", own=own)
        (down,) = (each for each in found if each.kernel == "down_kernel")
        pairs.append(dict(down.constants)["BLOCK_M"])
    assert pairs == [64, 16]
