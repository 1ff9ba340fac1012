"""Whole models on the device `interpreter`, by their batching loop, against the CPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.interpreted.held import Held
from tests.models.model_loop import ModelLoop
from tests.models.parity import save
from tests.models.specs import BY_NAME
from tests.models.test_steering import bias
from tests.models.tiny import write_llama
from tests.support.models import load, open_model
from tests.support.worker import decode_plan, state

from antiphon.kernels.op import KernelUnavailable
from antiphon.kernels.stream import InterpretedStream
from antiphon.model_worker.batching.plan import DeviceLost
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.plan import PlanRunner
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.runner.opening import OpenModel

OUTPUTS = 5


def opened(folder: Path, device: str) -> OpenModel:
    return open_model(folder, pages=100, dtype="float32", device=device)


def requests(vocabulary: int, count: int) -> list[RequestState]:
    """Greedy, drawn at random with all filters, penalised and biased, with logprobs."""
    random = np.random.default_rng(5)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 3},
        {"temperature": 1.2, "seed": 4},
        {
            "temperature": 0.0,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.2,
            "logit_bias": bias({7: 3.0, 11: -2.0}),
            "details": TokenOutputParams(logprobs=True, top=2, named_ids=(5,), prompt_start=2),
        },
    ]
    return [
        state(
            random.integers(1, vocabulary, 3 + 9 * number).tolist(),
            sampling=SamplingParams(max_new_tokens=OUTPUTS, **way),
        )
        for number, way in enumerate(ways[:count])
    ]


def outputs_of(
    model: OpenModel, runner: PlanRunner | None = None, *, overlap: bool, count: int
) -> list[Any]:
    asked = requests(model.spec.vocabulary, count)
    loop = ModelLoop(model, runner, overlap=overlap, chunk_tokens=20)
    ran = loop.run(asked)
    assert bool(loop.futures) == overlap
    assert [len(output.ids) for output in ran] == [OUTPUTS] * len(asked)
    return [(output.ids, [token.logprob for token in output.tokens]) for output in ran]


def check_device(folder: Path, overlaps: Sequence[bool] = (True,), count: int = 2) -> None:
    expected = outputs_of(opened(folder, "cpu"), overlap=False, count=count)
    model = opened(folder, "interpreter")
    backends = {choice.op: choice.backend for choice in model.runner.choices}
    assert {backends[op] for op in ("attention.paged", "norm.rmsnorm")} == {"triton"}
    for overlap in overlaps:
        model, runner = opened(folder, "interpreter"), None
        if overlap:
            # The device computes as late as it may.
            loaded = load(folder, dtype="float32", device="interpreter")
            stream = InterpretedStream(Held())
            runner = DeviceRunner(loaded, model.groups, stream)
        got = outputs_of(model, runner, overlap=overlap, count=count)
        for (ids, logprobs), (expected_ids, expected_logprobs) in zip(got, expected, strict=True):
            assert ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_llama_generates_what_it_does_on_the_cpu(tmp_path: Path) -> None:
    check_device(write_llama(tmp_path, {"num_hidden_layers": 2}), (False, True), count=4)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma2", "gpt-oss"])
def test_other_families_generate_what_they_do_on_the_cpu(family: str, tmp_path: Path) -> None:
    check_device(save(BY_NAME[family], tmp_path).folder)


@pytest.mark.parametrize(
    ("family", "op"),
    [("qwen3-next", r"recurrent\.layer"), ("deepseek-v3", r"latent attention \(MLA\)")],
)
def test_models_are_refused_by_the_op_that_has_no_kernel(
    family: str, op: str, tmp_path: Path
) -> None:
    folder = save(BY_NAME[family], tmp_path).folder
    reason = f"device interpreter: {op}, which this model needs, has no kernel there"
    with pytest.raises(KernelUnavailable, match=reason):
        opened(folder, "interpreter")


class LostStream(InterpretedStream):
    """A device that every call finds lost."""

    @contextmanager
    def launching(self) -> Generator[None]:
        raise torch.AcceleratorError("an illegal memory access was encountered")
        yield

    reading = launching


def test_a_device_that_is_lost_is_lost_for_the_loop_too(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    model = opened(folder, "interpreter")
    loaded = load(folder, dtype="float32", device="interpreter")
    runner = DeviceRunner(loaded, model.groups, LostStream())
    with pytest.raises(DeviceLost, match="an illegal memory access was encountered"):
        runner.run(decode_plan(1, 1, 5))


def test_bfloat16_is_refused_on_the_interpreter(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    with pytest.raises(KernelUnavailable, match="triton: it does not compute in bfloat16"):
        open_model(folder, pages=100, dtype="bfloat16", device="interpreter")
