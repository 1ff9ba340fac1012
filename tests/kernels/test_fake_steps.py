"""Whole steps on a GPU of fake tensors: no operand is the host's, and the host reads none."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.dry_run import SAMPLED, STEP_TOKENS, request
from tests.kernels.edits import Edit
from tests.kernels.fake_gpu import GPU, fake_gpu
from tests.kernels.no_data import open_without_data
from tests.kernels.published import MODELS
from tests.models.seeing_loop import SeeingLoop, seeing_request

from antiphon.kernels.triton import recurrent
from antiphon.model_worker.runner import context, decode_graphs, device_runner
from antiphon.model_worker.runner.device_runner import DeviceRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.models.model_loop import ModelLoop

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request

EMBEDDED: Mapping[str, Any] = json.loads(
    files("antiphon.embedded").joinpath("model", "config.json").read_text()
)
GATED_DELTA: Mapping[str, Any] = {
    **MODELS["Qwen3-30B-A3B"].config(2),
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 2,  # so that two layers have one of each kind
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}
MAMBA2: Mapping[str, Any] = {
    **MODELS["Llama-3.1-8B"].config(2),
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}
CONFIGS = [
    pytest.param(EMBEDDED, id="embedded"),
    pytest.param(MODELS["Qwen3-30B-A3B"].config(2), id="experts"),
    pytest.param(GATED_DELTA, id="gated delta states"),
    pytest.param(MAMBA2, id="mamba states"),
    pytest.param(MODELS["DeepSeek-V3"].config(2), id="latents", marks=pytest.mark.long),
]
GRAPH_SIZES, PREFILL_SIZES = (1, 4), (32, 80)
NEW_TOKENS = 6


class SomeDrafts:
    """Drafts token 0 for every other step: all tokens are 0 where nothing is computed."""

    def __init__(self) -> None:
        self._turn = 0

    def propose(self, request: Request, drafts_max: int) -> Ints:
        self._turn += 1
        return np.zeros(self._turn % 2 * min(drafts_max, 2), np.int32)

    def ended(self, request: Request) -> None:
        pass


def run_steps(config: Mapping[str, Any], cache_dtype: torch.dtype | None = None) -> None:
    """Prefills, decodes with graphs and without, drafts that are verified, and pages copied.

    One of the requests has an image, whose rows an encoder has made on the CPU.

    Raises:
        Exception: That of the first step that fails.
    """
    failed: list[Exception | None] = []
    with fake_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "_forget", lambda _, launched: failed.append(launched.error))
        model = open_without_data(
            config,
            page_tokens=64,
            pages=100,
            rows=8,
            positions=512,
            cache_dtype=cache_dtype,
            device=GPU,
        )
        runner = model.runner
        assert isinstance(runner, DeviceRunner)
        assert runner.pools[0].memory.data.device == GPU
        runner.page_memories()
        limits: dict[str, Any] = {"running_max": 8, "context_tokens": 512, "chunk_tokens": 64}
        limits |= {"step_tokens_max": STEP_TOKENS, "media_grids": False}
        loop = SeeingLoop(model, overlap=True, **limits, drafter=SomeDrafts())
        check(loop, failed)
        captured = () if runner.states else GRAPH_SIZES  # states are not captured whole
        assert runner.capture(GRAPH_SIZES).sizes == captured
        assert runner.capture_prefills(PREFILL_SIZES).sizes == PREFILL_SIZES
        check(loop, failed)


def check(loop: ModelLoop, failed: list[Exception | None]) -> None:
    lengths = (3, 70, 130, 1, 20)
    asked = [request(*each, NEW_TOKENS) for each in zip(lengths, SAMPLED, strict=True)]
    asked.append(seeing_request([3, (9, 0, 7), 5], 4, "image", max_new_tokens=NEW_TOKENS))
    outputs = loop.run(asked)
    if failed and failed[0] is not None:
        raise failed[0]
    assert [len(output.ids) for output in outputs] == [NEW_TOKENS] * len(asked)
    plans = [record.plan for record in loop.loop.recorder.records()]
    assert any(len(plan.logit_tokens) > len(plan.slot) for plan in plans)
    assert any(len(plan.tokens) == len(plan.slot) for plan in plans)
    assert any(plan.spliced is not None for plan in plans)


@pytest.mark.parametrize("config", CONFIGS)
def test_steps_stay_on_the_device(config: Mapping[str, Any]) -> None:
    run_steps(config)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3"])
def test_steps_with_a_cache_of_8_bits_stay_on_the_device(name: str) -> None:
    run_steps(MODELS[name].config(2), torch.float8_e4m3fn)


MUTANTS = {
    Edit(
        "rows of an image stay on the host",
        context,
        "self._upload(plan.spliced_rows)",
        "torch.as_tensor(plan.spliced_rows)",
    ): "same device",
    Edit(
        "the host reads a number",
        device_runner,
        "            sampled = self._sampler.draw(",
        "            logits.amax().item()\n            sampled = self._sampler.draw(",
    ): "_local_scalar_dense",
    Edit(
        "the host copies a tensor",
        device_runner,
        "results = [finite, logits_finite, sampled]",
        'results = [finite.to("cpu"), logits_finite, sampled]',
    ): "makes a tensor of the host of one of the device",
    Edit(
        "a kernel is launched with a tensor of the host",
        device_runner,
        "self._upload(_sampling_slots(plan, batch))",
        "torch.as_tensor(_sampling_slots(plan, batch))",
    ): "record_kernel is launched with a tensor of the host",
    Edit(
        "torch is called with a tensor of the host",
        context,
        "index_select(0, self._upload(plan.logit_tokens))",
        "index_select(0, torch.as_tensor(plan.logit_tokens))",
    ): "Expected all tensors to be on the same device",
    Edit(
        "a shape follows from data",
        decode_graphs,
        "        logits = self._decoder.logits(ctx, hidden)",
        "        rows.tokens.masked_select(rows.tokens >= 0)\n"
        "        logits = self._decoder.logits(ctx, hidden)",
    ): "aten.masked_select",
}
"""And what finds them."""


@pytest.mark.parametrize(
    ("mutant", "reason"), [pytest.param(*row, id=row[0].name) for row in MUTANTS.items()]
)
def test_a_mutant_is_found(mutant: Edit, reason: str) -> None:
    with mutant.applied(), pytest.raises(Exception, match=reason):
        run_steps(EMBEDDED)


STATE_MUTANTS = {
    Edit(
        "what states make is on the host",
        recurrent,
        "y = torch.empty((tokens, width), dtype=torch.float32, device=projected.device)",
        "y = torch.empty((tokens, width), dtype=torch.float32)",
    ): "scan_kernel is launched with a tensor of the host",
    Edit(
        "the host reads what states are made of",
        recurrent,
        "projected, made = projected.contiguous(), rows.on_device",
        "projected, made = projected.contiguous(), rows.on_device\n    projected.amax().item()",
    ): "_local_scalar_dense",
}


@pytest.mark.parametrize("config", [GATED_DELTA, MAMBA2], ids=["gated delta", "mamba"])
@pytest.mark.parametrize(
    ("mutant", "reason"), [pytest.param(*row, id=row[0].name) for row in STATE_MUTANTS.items()]
)
def test_a_mutant_of_states_is_found(mutant: Edit, reason: str, config: Mapping[str, Any]) -> None:
    with mutant.applied(), pytest.raises(Exception, match=reason):
        run_steps(config)
