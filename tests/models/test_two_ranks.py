"""Plans recorded on one rank, replayed by several processes over gloo, each with its own shard."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.models.stepper import Stepper
from tests.models.tiny import VOCABULARY, write_llama

from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.load import load
from antiphon.model_worker.runner.open import open_model

PAGES, PAGE_TOKENS = 128, 4
SCRIPT = Path(__file__).with_name("rank.py")


def load_script():
    spec = importlib.util.spec_from_file_location("rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank"] = module
    spec.loader.exec_module(module)
    return module


def run_on_one_rank(folder: Path, vocabulary: int = VOCABULARY) -> tuple[Stepper, list[list[int]]]:
    model = open_model(folder, page_tokens=PAGE_TOKENS, pages=PAGES, dtype="float32")
    batch = Stepper(model.runner, model.groups)
    random = np.random.default_rng(3)
    for length in (3, 18, 40):
        line = batch.add(random.integers(0, vocabulary, length).tolist())
        line.temperature, line.seed = (0.0 if length == 3 else 0.8), length
    tokens: list[list[int]] = []
    run = model.runner.run

    def recording(plan):
        outcome = run(plan)
        tokens.append(outcome.token_ids.tolist())
        return outcome

    model.runner.run = recording
    batch.prefill(chunk=9)
    batch.decode(12, as_future=True)
    return batch, tokens


def run_on(ranks: int, run: Path) -> None:
    numbers = [str(number) for number in (ranks, PAGES, PAGE_TOKENS)]
    processes = [
        subprocess.Popen([sys.executable, SCRIPT, run, str(rank), *numbers], stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()


SHAPES: tuple[dict[str, object], ...] = (
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 1, "tie_word_embeddings": True},  # fewer kv heads than ranks
)


@pytest.mark.timeout(90)
def test_two_ranks_sample_the_tokens_of_one(tmp_path: Path) -> None:
    script = load_script()
    expected: dict[Path, list[list[int]]] = {}
    for index, shape in enumerate(SHAPES):
        case = tmp_path / f"case-{index}"
        case.mkdir()
        batch, expected[case] = run_on_one_rank(write_llama(case / "model", shape))
        recorded = [script.record(plan) for plan in batch.plans]
        (case / "plans.json").write_bytes(msgspec.json.encode(recorded))
    run_on(2, tmp_path)
    for case, tokens in expected.items():
        for rank in range(2):
            sampled = msgspec.json.decode((case / f"tokens.{rank}.json").read_bytes())
            assert sampled == tokens, f"rank {rank} of {case.name}"
        assert sum(map(len, tokens)) > 36


class OneOfThree:
    rank, ranks = 1, 3

    def all_reduce(self, x):
        raise AssertionError("nothing runs before the weights fit")

    all_gather = all_reduce


def test_ranks_that_cannot_cut_the_model_are_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="3 ranks"):
        load(llama, tp=OneOfThree())
