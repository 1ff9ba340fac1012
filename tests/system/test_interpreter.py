"""The whole stack on the device `interpreter`: the path of a GPU, with Triton's interpreter."""

from __future__ import annotations

import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.models.draft_models import noisy
from tests.models.test_experts import in_nvfp4, rewrite
from tests.system.stack import run_antiphon, serving, wait_until
from tests.system.test_ranks import END_S, ranks_of

from antiphon import embedded
from antiphon.wire.digests import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

PROMPTS = (
    "What colour is the sky?",
    "12 + 30 =",
    "The capital of France is",
    "Count from one to ten:",
    "Say hello.",
    "A cat and a dog",
)
SUMS = tuple(f"What is {3 * number + 7} + {5 * number % 83}?" for number in range(64))
OUTPUTS = 12
STAND_IN = Path(__file__).parents[1] / "kernels" / "stand_in"
"""What stands for FlashInfer."""
AFTER_BLOCKS = {
    "input_ids": [5 + number * 7 % 200 for number in range(5 * BLOCK_TOKENS + 3)],
    "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
}
"""A prompt of whole blocks, which are worth fetching, and some tokens."""
STORING = ("--enable-hierarchical-cache", "--hicache-storage-backend", "kv_storage")
GRAPHS = ("--cuda-graph-bs", "1", "2", "4", "6")
IN_TURN = ("--disable-overlap-schedule", "--disable-cuda-graph")
TWO_RANKS = ("--tp-size", "2")
TWO_STAGES = ("--pp-size", "2")


def answers(stack: Stack, prompts: Sequence[str] = PROMPTS) -> list[Any]:
    """The greedy tokens of all prompts, which are decoded together."""

    def ask(prompt: str) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": OUTPUTS, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling}
        answer = stack.post("/generate", body, timeout_s=600)
        assert len(answer["output_ids"]) == OUTPUTS
        return answer["output_ids"]

    with ThreadPoolExecutor(len(prompts)) as asking:
        return list(asking.map(ask, prompts))


def continued(stack: Stack, ranks: int) -> Any:
    """The first tokens after whole blocks, once the worker has their pages and once it has not."""
    computed = stack.post("/generate", AFTER_BLOCKS, timeout_s=300)
    saved = f'antiphon_saved_blocks_total{{result="stored"}} {5 * ranks}'
    wait_until(lambda: saved in stack.get("/metrics"), 60, "blocks saved")
    stack.get("/flush_cache")
    fetched = stack.post("/generate", AFTER_BLOCKS, timeout_s=300)
    assert fetched["meta_info"]["cached_tokens"] == 5 * BLOCK_TOKENS
    assert fetched["output_ids"] == computed["output_ids"]
    return computed["output_ids"]


@pytest.fixture(scope="module")
def on_cpu() -> tuple[Any, Any]:
    """The answers of the CPU, and the first tokens after whole blocks."""
    with serving("--dtype", "float32") as stack:
        after_blocks = stack.post("/generate", AFTER_BLOCKS, timeout_s=300)
        return answers(stack), after_blocks["output_ids"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(GRAPHS, id="overlapped", marks=pytest.mark.long),
        pytest.param(IN_TURN, id="in turn"),
        pytest.param((*IN_TURN, *STORING), id="in turn, stored", marks=pytest.mark.long),
        pytest.param((*TWO_RANKS, *GRAPHS), id="two ranks"),
        pytest.param((*TWO_RANKS, *IN_TURN, *STORING), id="two in turn", marks=pytest.mark.long),
        pytest.param((*TWO_STAGES, *STORING), id="two stages", marks=pytest.mark.long),
    ],
)
def test_interpreted_kernels_generate_what_the_cpu_does(
    flags: tuple[str, ...], on_cpu: tuple[Any, Any]
) -> None:
    expected, after_blocks = on_cpu
    captured = "1 2 4 6" if GRAPHS[0] in flags else "none"
    with serving("--device", "interpreter", *flags) as stack:
        assert answers(stack) == expected
        ranks = 2 if {TWO_RANKS[0], TWO_STAGES[0]} & {*flags} else 1
        if STORING[0] in flags:
            assert continued(stack, ranks) == after_blocks
        log = stack.log("worker-0")
        assert re.search(rf"graph_sizes +{captured} ", log)
        assert ("capturing decode steps" in log) == (captured != "none")
        summed = captured != "none" and ranks > 1
        assert ("sums over ranks inside: not yet run on a GPU" in log) == summed
        assert "attention.paged        triton" in log
        assert "batching loop stalled" not in log
        if ranks > 1:
            lose_a_rank(stack)


def lose_a_rank(stack: Stack) -> None:
    """The worker ends with its rank."""
    worker = stack.pid("worker-0")
    assert worker is not None
    (rank,) = ranks_of(worker)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: stack.pid("worker-0") != worker, END_S, "the end of the worker")


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model with noise, which is right about some tokens and wrong about others."""
    folder = tmp_path_factory.mktemp("models") / "draft"
    shutil.copytree(embedded.path(), folder)
    weights = folder / "model.safetensors"
    save_file(noisy(load_file(weights)), weights, metadata={"format": "pt"})
    return folder


@pytest.mark.long
@pytest.mark.parametrize("schedule", [GRAPHS, IN_TURN], ids=["captured", "in turn"])
def test_two_ranks_with_a_draft_model_generate_what_the_cpu_does(
    schedule: tuple[str, ...], draft_model: Path, on_cpu: tuple[Any, Any]
) -> None:
    """Drafts are verified there, too: some are accepted, and some are not."""
    drafting = ("--speculative-algorithm", "STANDALONE")
    drafting += ("--speculative-draft-model-path", str(draft_model))
    with serving("--device", "interpreter", *TWO_RANKS, *schedule, *drafting) as stack:
        assert answers(stack) == on_cpu[0]
        accepted = re.compile(r"^antiphon_spec_accept_rate(?:\{.*\})? (\S+)$", re.MULTILINE)
        rates = list[str]()

        def verified() -> bool:
            rates[:] = accepted.findall(stack.get("/metrics"))
            return any(float(rate) > 0 for rate in rates)

        wait_until(verified, 30, "the share of accepted drafts")
        assert len(rates) == 1
        assert float(rates[0]) < 1
        assert "batching loop stalled" not in stack.log("worker-0")
        lose_a_rank(stack)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_prompts_generate_what_they_do_on_the_cpu() -> None:
    found: list[Any] = []
    for device in ("cpu", "interpreter"):
        with serving("--device", device, "--dtype", "float32") as stack:
            found.append(answers(stack, SUMS))
    assert found[0] == found[1]


@pytest.mark.long
def test_weights_in_nvfp4_generate_what_they_do_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded.path(), folder)
    rewrite(folder, *in_nvfp4(folder))
    found: list[Any] = []
    for device in ("cpu", "interpreter"):
        flags = ("--model-path", str(folder), "--device", device, "--dtype", "float32", *IN_TURN)
        with serving(*flags) as stack:
            found.append(answers(stack))
            log = stack.log("worker-0")
            assert "modelopt_fp4" in log
            assert ("linear.grouped         triton" in log) == (device == "interpreter")
    assert found[0] == found[1]


@pytest.mark.long
def test_flashinfer_generates_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("--dtype", "float32") as stack:
        expected = answers(stack)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
    for flags in (("--cuda-graph-bs", "1", "2", "4", "6"), ("--disable-cuda-graph",)):
        with serving(
            "--device", "interpreter", "--attention-backend", "flashinfer", *flags
        ) as stack:
            assert answers(stack) == expected
            assert "attention.paged        flashinfer" in stack.log("worker-0")


@pytest.mark.long
def test_vectors_are_those_of_the_cpu() -> None:
    found: list[Any] = []
    for device in ("cpu", "interpreter"):
        with serving("--is-embedding", "--device", device, "--dtype", "float32") as stack:
            answer = stack.post("/v1/embeddings", {"model": "default", "input": [*PROMPTS]}, 300)
            found.append(np.array([each["embedding"] for each in answer["data"]]))
            assert ("attention.paged        triton" in stack.log("worker-0")) == bool(found[1:])
    assert found[0].shape == found[1].shape
    assert np.abs(found[1] - found[0]).max() < 1e-4


def test_a_gpu_that_is_not_there_is_named_in_one_line() -> None:
    ran = run_antiphon("serve", "--device", "cuda:3", "--port", "0", timeout_s=120)
    lines = [line for line in ran.stdout.splitlines() + ran.stderr.splitlines() if "cuda:3" in line]
    assert ran.returncode != 0
    assert len(lines) == 1
    assert "worker-0 cannot start: model.device = cuda:3: no such device: torch" in lines[0]


def test_the_interpreter_is_not_in_the_help() -> None:
    ran = run_antiphon("serve", "--help")
    assert "cuda:N" in ran.stdout
    assert "interpreter" not in ran.stdout
