"""Bits of a token on the kernels of deterministic inference, alone and beside others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.interpreted.checks import DTYPES, Codes, a_shape, expert_matrix, randn
from tests.models.model_loop import ModelLoop
from tests.models.parity import save
from tests.models.specs import BY_NAME
from tests.models.tiny import write_llama
from tests.support.models import open_model
from tests.support.worker import state

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.experts import ExpertWeights
from antiphon.kernels.kv import UNSCALED, row_pages_shape
from antiphon.kernels.linear_grouped import GroupedMatrix
from antiphon.kernels.op import REGISTRY, DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

OPS = select(DeviceCapability("interpreter"), invariant=True)
PLAIN = select(DeviceCapability("interpreter"))
OFTEN, *RARELY = DTYPES
dtypes = pytest.mark.parametrize(
    "dtype",
    [OFTEN, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in RARELY)],
    ids=str,
)


def test_every_kernel_has_a_way_that_is_invariant_but_those_that_are_not_needed() -> None:
    invariant = {choice.op for choice in OPS.choices if choice.backend == "triton"}
    assert all(choice.invariant for choice in OPS.choices if choice.op in invariant)
    kernels = {choice.op for choice in PLAIN.choices if choice.backend == "triton"}
    assert kernels - invariant == {"linear.fp8"}
    followed = kernels - {choice.op for choice in PLAIN.choices if choice.invariant}
    assert followed == {"attention.paged", "moe.experts", "linear.fp8", "linear.grouped"}
    assert followed <= REGISTRY.keys()


@dtypes
def test_linears_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = randn(150, 100, dtype=dtype), randn(40, 100, dtype=dtype, seed=1)
    whole = OPS.linear_tiled(x, weight, weight[:, 0].contiguous())
    for first, last in ((0, 1), (63, 66), (7, 130), (149, 150)):
        part = OPS.linear_tiled(x[first:last], weight, weight[:, 0].contiguous())
        assert torch.equal(part, whole[first:last]), (first, last)


@dtypes
def test_linears_of_heads_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = randn(90, 3, 72, dtype=dtype), randn(3, 40, 72, dtype=dtype, seed=1)
    whole = OPS.linear_heads(x, weight)
    for first, last in ((0, 1), (63, 66), (89, 90)):
        assert torch.equal(OPS.linear_heads(x[first:last], weight), whole[first:last])


@dtypes
def test_linears_in_groups_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """With more tokens than a tile of few has room for."""
    codes, scales = torch.arange(40 * 48).byte().view(40, 48), randn(3, 40, seed=1).abs()
    x, matrix = randn(70, 96, dtype=dtype), GroupedMatrix(codes, scales, None, 32, -8)
    whole = OPS.linear_grouped(x, matrix)
    for first, last in ((0, 1), (63, 66), (7, 50)):
        assert torch.equal(OPS.linear_grouped(x[first:last], matrix), whole[first:last])


@dtypes
@pytest.mark.parametrize(
    "kept", [None, pytest.param(("e2m1", 32), marks=pytest.mark.long)], ids=str
)
def test_experts_do_not_depend_on_the_batch(
    dtype: torch.dtype, kept: tuple[Codes, int] | None
) -> None:
    """With more pairs than a tile of few has room for, which others are multiplied in."""
    count, hidden, width = 3, 64, 32
    gate_up, down = (
        expert_matrix(size, dtype, kept, bias=False, seed=seed)
        for seed, size in enumerate(((count, 2 * width, hidden), (count, hidden, width)))
    )
    weights = ExpertWeights(gate_up, down)
    x, shares = randn(90, hidden, dtype=dtype) / hidden**0.5, randn(90, 2, seed=7).abs()
    chosen = torch.rand(90, count, generator=torch.Generator().manual_seed(1)).argsort()[:, :2]
    whole = OPS.experts(x, chosen, shares, weights, "silu")
    for part in (slice(0, 1), slice(20, 31), slice(40, 90)):
        made = OPS.experts(x[part], chosen[part], shares[part], weights, "silu")
        assert torch.equal(made, whole[part]), part


class Cache:
    """A sequence of 700 tokens in the pages of a cache, or of latents, and another one."""

    def __init__(self, shape: KvShape, *, latents: bool = False) -> None:
        self._shape = shape
        pages = 2 * -(-700 // shape.page_tokens)
        size = row_pages_shape(pages, shape.page_tokens, shape.heads, shape.head_size)
        self._cache = [randn(*size, dtype=shape.dtype, seed=seed) for seed in (1, 2)]
        self._table = np.random.default_rng(3).permutation(pages).astype(np.int32).reshape(2, -1)
        heads = shape.heads * shape.queries_per_head
        self._q = randn(2, 700, heads, shape.head_size, dtype=shape.dtype, seed=4)
        self._sinks = randn(heads, dtype=shape.dtype, seed=5)
        if latents:
            self._cache, self._sinks = [self._cache[0]] * 2, None

    def attend(self, *rows: tuple[int, int, int]) -> list[Tensor]:
        """Of rows (sequence, first token, behind the last), all in one pass."""
        sequences, firsts, lasts = (np.array(part, np.int32) for part in zip(*rows, strict=True))
        metadata = AttentionMetadata(
            self._shape, self._table[sequences], lasts - firsts, lasts, torch.tensor
        )
        q = torch.cat([self._q[sequence, first:last] for sequence, first, last in rows])
        keys, values = self._cache
        made = OPS.paged_attention(q, keys, values, metadata, 0.2, UNSCALED, None, self._sinks)
        return [*made.split((lasts - firsts).tolist())]


@dtypes
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 90])
def test_attention_depends_on_neither_batch_nor_chunks(
    dtype: torch.dtype, window: int | None
) -> None:
    """A token alone, as a decode step has it, has the bits that it has in a chunk of a prefill."""
    check_attention(Cache(a_shape(window=window, dtype=dtype)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_latents_depends_on_neither_batch_nor_chunks(dtype: torch.dtype) -> None:
    """In tiles of four queries, of which a decode step has one."""
    check_attention(Cache(a_shape(1, 16, 40, dtype=dtype), latents=True))


def check_attention(cache: Cache) -> None:
    (whole,) = cache.attend((0, 560, 700))
    for first, last in ((699, 700), (600, 601), (590, 640), (560, 563)):
        (alone,) = cache.attend((0, first, last))
        assert torch.equal(alone, whole[first - 560 : last - 560]), (first, last)
        _, beside, _ = cache.attend((1, 30, 31), (0, first, last), (1, 100, 170))
        assert torch.equal(alone, beside), (first, last)


DETAILS = TokenOutputParams(logprobs=True, top=2)


def answers(folder: Path, chosen: Sequence[int], chunk: int, sizes: Sequence[int]) -> list[Any]:
    """Tokens and logprobs of these requests, in chunks, with graphs of these sizes.

    And of prefills of ten times as many tokens.
    """
    model = open_model(
        folder,
        pages=200,
        dtype="float32",
        device="interpreter",
        linear="tiled",
        deterministic=True,
    )
    assert isinstance(model.runner, DeviceRunner)
    model.runner.capture(sizes)
    model.runner.capture_prefills([10 * size for size in sizes])
    prompts = [[3, 1, 4], [*range(5, 42)], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
    asked = [
        state(
            prompts[number],
            request_id=RequestId(str(number)),
            max_new_tokens=4,
            temperature=1.0,
            seed=number,
            details=DETAILS,
        )
        for number in chosen
    ]
    loop = ModelLoop(model, overlap=True, chunk_tokens=chunk, step_tokens_max=40)
    return [
        (output.ids, [(token.logprob, token.top) for token in output.tokens])
        for output in loop.run(asked)
    ]


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "deepseek-v3"))],
)
def test_models_depend_on_neither_batch_nor_chunks_nor_graphs(family: str, tmp_path: Path) -> None:
    if family == "llama":
        folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    else:
        folder = save(BY_NAME[family], tmp_path).folder
    together = answers(folder, (0, 1, 2), chunk=17, sizes=(2, 4))
    for number in (1,) if family == "llama" else range(3):
        (alone,) = answers(folder, (number,), chunk=9, sizes=())
        assert alone == together[number]
