"""The stages of `make test-gpu` on the interpreter: what they call is there, and they compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.gpu import bench, checks
from tests.kernels.dry_run import worker_launches
from tests.kernels.interpreted.checks import RAGGED, a_shape, check_attention, check_heads
from tests.kernels.on_device import OnDevice
from tests.kernels.published import MODELS
from tests.models.tiny import VOCABULARY, write_llama

from antiphon.kernels.triton import attention, heads
from antiphon.model_worker.runner.decode_graphs import DecodeGraphs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
    from antiphon.kernels.stream import Cut
    from antiphon.model_worker.batching.plan import StepPlan

TINY = replace(MODELS["Llama-3.1-8B"], hidden=64, width=96, heads=(4, 2, 16), vocabulary=300)
SPARSE = replace(TINY, experts=(4, 2))


def test_arguments_are_copied_to_a_device_and_back() -> None:
    """Memory that two tensors share is the same there, and what kernels write in it comes back."""
    cpu = torch.device("cpu")
    check_heads(OnDevice(heads, cpu), 9, (6, 2, 32, 32))
    check_attention(OnDevice(attention, cpu), a_shape(), RAGGED, sinks=True)


def test_an_argument_that_is_not_copied_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.on_device._Copies.bring_back", lambda _: None)
    with pytest.raises(AssertionError):
        check_heads(OnDevice(heads, torch.device("cpu")), 9, (6, 2, 32, 32))


@pytest.mark.long
def test_flashinfer_is_compared_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not installed" in checks.flashinfer("interpreter")["left out"]
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "stand_in")
    few = {"rows": 2, "prompt_tokens": 5, "new_tokens": 4}
    facts = checks.flashinfer("interpreter", dtype="float32", **few)
    assert facts == {"cases": 72, "tokens": 8, "equal": 8}


def test_a_launch_outside_the_compile_table_is_found() -> None:
    """The launches of this worker are those of its dry run; of these, one is left out."""
    every = worker_launches(TINY.config(2), dtype=torch.float32)
    table = [launch for launch in every if launch.kernel != "log_mass_kernel"]
    with pytest.raises(AssertionError, match=r"^1 launches are not .*'log_mass_kernel'"):
        checks.launches(TINY, "interpreter", table, dtype="float32", prompts=(3, 70, 9))


SIZES: Mapping[str, Any] = {"dtype": "float32", "rows": 3, "rows_padded": 2, "new_tokens": 5}


def test_steps_with_graphs_and_without_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    found = checks.graphs(folder, "interpreter", **SIZES)
    assert found == {"rows": 3, "rows_padded": 2, "tokens": 25}
    run = DecodeGraphs._run

    def another(graphs: DecodeGraphs, size: int, cut: Cut) -> None:
        run(graphs, size, cut)
        graphs._outputs_of(size).logits[:, 1:].mul_(1 + 1e-6)

    monkeypatch.setattr(DecodeGraphs, "_run", another)
    with pytest.raises(AssertionError):
        checks.graphs(folder, "interpreter", **SIZES)


def test_padded_steps_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph whose rows behind those of requests are wrong, and change those of requests."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    score = DecodeGraphs.score

    def another(graphs: DecodeGraphs, plan: StepPlan, groups: Sequence[Any]) -> FusedDecoderOutput:
        made = score(graphs, plan, groups)
        if len(plan.slot) == 2 and graphs._graphs[3].size_bytes:  # captured, and padded
            made.logits[0, 1:].mul_(1 + 1e-6)
        return made

    monkeypatch.setattr(DecodeGraphs, "score", another)
    with pytest.raises(AssertionError):
        checks.graphs(folder, "interpreter", **SIZES)


@pytest.mark.long
def test_deterministic_steps_are_compared(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    facts = checks.determinism(folder, "interpreter", dtype="float32", rows=3)
    assert facts == {"rows": 3, "tokens": 48}


@pytest.mark.long
def test_two_ranks_are_compared_with_one(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    facts = checks.ranks(folder, "interpreter", dtype="float32", rows=3, new_tokens=5)
    assert facts == {"rows": 3, "tokens": 15, "equal": 15}


def test_prompts_are_compared_with_those_of_the_cpu(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    asked = [[5 + number * 7 % (VOCABULARY - 5) for number in range(6)], [9, 8, 7]]
    facts = checks.prompts(folder, "interpreter", asked, new_tokens=4)
    assert (facts["prompts"], facts["tokens"], facts["equal_float32"]) == (2, 8, 8)


@pytest.mark.long
def test_every_bench_runs() -> None:
    small = bench.GpuBench("interpreter", copy_bytes=1 << 16, side=32)
    found = bench.memory(small, TINY, tokens=4, rows=2, keys=70)
    assert found["attention.paged, 2 rows of 70"]["share"] > 0
    found = bench.matmul(small, TINY, SPARSE, counts=(3,))
    assert {name.partition(",")[0] for name in found if "," in name} == {
        "linear.fp8",
        "moe.experts",
    }
    assert bench.sampling(small, rows=2, vocabulary=300)["top-k 50"]["reads"] > 0
    found = bench.decode(small, TINY, layers=1, batches=(2,), prompt_tokens=5, new_tokens=12)
    assert 0 < found["batch 2"]["host_ms"] <= found["batch 2"]["step_ms"]
    found = bench.prefill(small, TINY, layers=1, lengths=(3, 9))
    assert found["9 tokens, in pieces"]["milliseconds"] > 0
