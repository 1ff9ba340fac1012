"""Deterministic mode: the bits of a request depend on the request alone.

Each way in which a sequence can come to be computed is one function; all of them must give, at
every position, the logits that decoding the sequence alone token by token gives, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, threads
from tests.models.parity import save, texts
from tests.models.specs import BY_NAME, windowed
from tests.models.stepper import Line, Stepper, spy_on_logits
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.models import load, with_spec

from antiphon.kernels.op import KernelUnavailable
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

PAGE_TOKENS = 16
RANDOM = np.random.default_rng(12)
PROMPT = RANDOM.integers(0, VOCABULARY, 75).tolist()
OTHERS = [RANDOM.integers(0, VOCABULARY, 1 + 3 * n).tolist() for n in range(63)]
NEW_TOKENS = 12


@dataclass(frozen=True)
class Kind:
    """A model and how it is kept."""

    dtype: str
    linear: str
    fused: bool
    windows: tuple[int | None, ...] | None = None
    cache: str = "auto"


KINDS = {
    "bfloat16": Kind("bfloat16", "packed", fused=True),
    "float32": Kind("float32", "packed", fused=True),
    "layer by layer": Kind("bfloat16", "packed", fused=False),
    "int8": Kind("bfloat16", "int8", fused=True),
    "int8 activations": Kind("bfloat16", "int8_dynamic", fused=True),
    "e4m3 cache": Kind("bfloat16", "packed", fused=True, cache="fp8_e4m3"),
    "e5m2 cache, layer by layer": Kind("float32", "packed", fused=False, cache="fp8_e5m2"),
    "windows": Kind("bfloat16", "packed", fused=True, windows=(None, 20, None, 20)),
}


@dataclass
class Bench:
    """A deterministic runner, and the logits that it last computed."""

    stepper: Stepper
    seen: list[Tensor]

    @classmethod
    def of(cls, folder: Path, kind: Kind) -> Bench:
        model = load(folder, dtype=kind.dtype, linear=kind.linear, cache_dtype=kind.cache)
        if kind.windows is not None:
            model = with_spec(folder, model, windowed(model.spec, kind.windows), kind.linear)
        groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=1024)
        runner = ModelRunner(model, groups, fused=kind.fused, deterministic=True)
        return cls(Stepper(runner, groups), spy_on_logits(runner))

    def warm(self, ids: list[int], seed: int) -> Line:
        line = self.stepper.add(ids)
        line.temperature, line.top_p, line.top_k, line.seed = 1.1, 0.95, 40, seed
        return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for several panels and tiles, and of no round number."""
    fields = {"hidden_size": 72, "intermediate_size": 136, "head_dim": 18, "vocab_size": VOCABULARY}
    return write_llama(tmp_path_factory.mktemp("llama"), fields)


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def truth(folder: Path, kind: Kind) -> tuple[list[int], Tensor]:
    """A sequence sampled alone, and the logits of its every position, computed one by one."""
    bench = Bench.of(folder, kind)
    line = bench.warm(PROMPT, seed=5)
    bench.stepper.step({0: len(PROMPT)})
    bench.stepper.decode(NEW_TOKENS - 1)
    one_by_one = Bench.of(folder, kind)
    one_by_one.stepper.add(line.ids)
    for _ in line.ids:
        one_by_one.stepper.step({0: 1}, all_logits=True)
    return line.ids, torch.cat(one_by_one.seen)


def whole(bench: Bench, ids: list[int]) -> Tensor:
    """All at once, as after a retraction or on another worker."""
    bench.stepper.add(ids)
    bench.stepper.step({0: len(ids)}, all_logits=True)
    return bench.seen[-1]


def in_chunks(bench: Bench, ids: list[int], chunk: int) -> Tensor:
    bench.stepper.add(ids)
    for start in range(0, len(ids), chunk):
        bench.stepper.step({0: min(chunk, len(ids) - start)}, all_logits=True)
    return torch.cat(bench.seen)


def behind_a_cached_prefix(bench: Bench, ids: list[int]) -> Tensor:
    """The first pages were computed by another request, in chunks and beside a third one."""
    first = bench.stepper.add(ids[: 2 * PAGE_TOKENS + 5])
    bench.stepper.add(OTHERS[20])
    bench.stepper.step({0: 7, 1: 11})
    bench.stepper.step({0: 30, 1: 5})
    line = bench.stepper.add(ids)
    bench.stepper.share(first, line, 2 * PAGE_TOKENS)
    bench.seen.clear()
    bench.stepper.step({2: len(ids) - line.computed}, all_logits=True)
    return bench.seen[-1]


def among_63_others(bench: Bench, ids: list[int]) -> Tensor:
    """Prefilled beside others that decode, then decoded beside them."""
    for other in OTHERS:
        bench.stepper.add(other)
    bench.stepper.step({slot: len(other) for slot, other in enumerate(OTHERS)})
    bench.stepper.add(ids)
    bench.seen.clear()
    slots = [*range(20), 63, *range(20, 63)]
    ours: list[Tensor] = []
    while (left := len(ids) - bench.stepper.lines[63].computed) > 0:
        length = 50 if left > 50 else 1
        bench.stepper.step({slot: length if slot == 63 else 1 for slot in slots}, all_logits=True)
        ours.append(bench.seen[-1][20 : 20 + length])
    return torch.cat(ours)


WAYS: dict[str, Callable[[Bench, list[int]], Tensor]] = {
    "whole": whole,
    "chunks of 2": lambda bench, ids: in_chunks(bench, ids, 2),
    "chunks of 13": lambda bench, ids: in_chunks(bench, ids, 13),
    "chunks of 64": lambda bench, ids: in_chunks(bench, ids, 64),
    "behind a cached prefix": behind_a_cached_prefix,
    "among 63 others": among_63_others,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_logits_have_the_same_bits_whichever_way_they_are_computed(
    folder: Path, kind: Kind, truth: tuple[list[int], Tensor], way
) -> None:
    ids, expected = truth
    got = way(Bench.of(folder, kind), ids)
    assert torch.equal(got, expected[len(ids) - len(got) :])


def test_sampled_tokens_are_the_same_in_a_batch_of_64(
    folder: Path, kind: Kind, truth: tuple[list[int], Tensor]
) -> None:
    bench = Bench.of(folder, kind)
    for seed, other in enumerate(OTHERS[:30]):
        bench.warm(other, seed)
    line = bench.warm(PROMPT, seed=5)
    for seed, other in enumerate(OTHERS[30:]):
        bench.warm(other, 100 + seed)
    bench.stepper.prefill(chunk=40)
    bench.stepper.decode(len(truth[0]) - len(line.ids))
    assert line.ids == truth[0]


def test_a_continued_sequence_samples_what_it_would_have_sampled(
    folder: Path, kind: Kind, truth: tuple[list[int], Tensor]
) -> None:
    """A retraction or a migration: the tokens so far are the prompt."""
    bench = Bench.of(folder, kind)
    line = bench.warm(truth[0][: len(PROMPT) + 4], seed=5)
    bench.stepper.prefill(chunk=33)
    bench.stepper.decode(len(truth[0]) - len(line.ids))
    assert line.ids == truth[0]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(
    folder: Path, kind: Kind, truth: tuple[list[int], Tensor], number: int
) -> None:
    with threads(number):
        assert torch.equal(whole(Bench.of(folder, kind), truth[0]), truth[1])


def test_what_cannot_be_deterministic_does_not_start(folder: Path) -> None:
    def start(linear: str, dtype: str = "float32", **forced: str) -> None:
        model = load(folder, dtype=dtype, linear=linear)
        groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=8)
        ModelRunner(model, groups, deterministic=True, forced=forced)

    start("packed")
    with pytest.raises(KernelUnavailable, match=r"set model\.linear to packed"):
        start("plain")
    with pytest.raises(KernelUnavailable, match=r"norm.rmsnorm runs on torch.*torch is forced"):
        start("packed", **{"norm.rmsnorm": "torch"})


def bits(folder: Path, dtype: str, chunks: list[int], others: int) -> Tensor:
    """Logits of a prompt in such chunks, beside so many others, by a deterministic runner."""
    model = load(folder, dtype=dtype, linear="packed")
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=256)
    runner = ModelRunner(model, groups, deterministic=True)
    batch = Stepper(runner, groups)
    seen = spy_on_logits(runner)
    batch.add(texts()[-1])
    for other in range(others):
        batch.add(texts()[other % 2])
    parts: list[Tensor] = []
    for index, chunk in enumerate(chunks):
        beside = dict.fromkeys(range(1, others + 1), 3) if index < 3 else {}
        batch.step({0: chunk, **beside}, all_logits=True)
        parts.append(seen[-1][:chunk])
    return torch.cat(parts)


OTHER_FAMILIES = [
    *("mixtral", "qwen2-moe", "glm4-moe", "gpt-oss", "llama4", "deepseek-v2", "deepseek-v3"),
    *("gemma", "gemma2", "gemma3", "granite", "phi", "glm4", "olmo2", "smollm3"),
    *("gpt2", "gpt neox", "falcon-h1", "qwen3-next", "qwen3-next with experts"),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3n", "gemma4")),
]


@pytest.fixture(scope="module", params=OTHER_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(BY_NAME[request.param], tmp_path_factory.mktemp("family")).folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_other_families_do_not_depend_on_chunks_and_neighbours(
    family: Path, dtype: str
) -> None:
    length = len(texts()[-1])
    alone = bits(family, dtype, [1] * length, others=0)
    for chunks, others in (([length], 0), ([length], 5), ([7, 20, length - 27], 2)):
        assert torch.equal(bits(family, dtype, chunks, others), alone), (chunks, others)
