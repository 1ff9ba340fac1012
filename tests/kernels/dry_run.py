"""The launches of Triton kernels in passes of published models, recorded without a device.

Tensors have shapes and no data, and nothing runs: what is recorded is what a GPU would have to
compile. The kernels are in bfloat16, as these models are served; some with a KV cache of 8 bits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.experts import ExpertWeights
from antiphon.kernels.kv import UNSCALED, row_pages_shape
from antiphon.kernels.linear_fp8 import E4M3, Fp8Matrix
from antiphon.kernels.norm import NormWeights
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import QkNormWeights
from antiphon.kernels.routing import RoutingSpec
from antiphon.kernels.triton.backend import E4M3_SM
from antiphon.kernels.triton.launch import RECORDING

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.triton.launch import Constant

ALIGNMENT = 16
ALIGNED = ":16"
"""Behind the type of a pointer to so many whole bytes: only there are 128 bits loaded at once."""
PAGE_TOKENS = 16
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What of a launch determines its binary."""

    module: str
    kernel: str
    # Types as `triton.compile` names them, and alignment. Integers are not specialised: what is
    # the same in every pass is a constant, and what is not must not make another binary.
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int

    def runs_on(self, sm: int) -> bool:
        """Whether the rows of the selection table let it run there."""
        return sm >= E4M3_SM or not any("fp8e4nv" in argument for argument in self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the kernels see of a model."""

    hidden: int
    width: int
    heads: tuple[int, int, int]  # query heads, kv heads, head size
    vocabulary: int
    activation: ActivationKind | tuple[float, float] = "silu"
    window: int | None = None  # of some layers
    softcap: float | None = None
    sinks: bool = False
    head_norms: bool = False
    experts: tuple[int, int] | None = None  # their number, and how many a token has
    caches: tuple[torch.dtype, ...] = (torch.bfloat16,)
    # Inputs that share a scale where linears are in fp8, too: 0: all of an output; None: they never
    # are.
    fp8_group: int | None = None


BOTH_CACHES = (torch.bfloat16, torch.float8_e4m3fn)
MODELS = {
    "Llama-3.1-8B": Sizes(
        hidden=4096,
        width=14336,
        heads=(32, 8, 128),
        vocabulary=128256,
        caches=BOTH_CACHES,
        fp8_group=0,
    ),
    "gemma-2-9b": Sizes(
        hidden=3584,
        width=14336,
        heads=(16, 8, 256),
        vocabulary=256000,
        activation="gelu_tanh",
        window=4096,
        softcap=50.0,
    ),
    "Qwen3-30B-A3B": Sizes(
        hidden=2048,
        width=768,
        heads=(32, 4, 128),
        vocabulary=151936,
        head_norms=True,
        experts=(128, 8),
        fp8_group=128,
    ),
    "gpt-oss-20b": Sizes(
        hidden=2880,
        width=2880,
        heads=(64, 8, 64),
        vocabulary=201088,
        activation=(1.702, 7.0),
        window=128,
        sinks=True,
        experts=(32, 4),
        caches=BOTH_CACHES,
    ),
}


def every_launch() -> list[Launch]:
    """Those of a prefill, and of decode steps with short, long and longest rows, of all models.

    Of sampling, those of the largest vocabulary.
    """
    passes = [_Pass(sizes) for sizes in MODELS.values()]
    largest = max(MODELS.values(), key=lambda sizes: sizes.vocabulary)
    with _recording() as found:
        for each in passes:
            each.run()
        _Pass(largest).sample(64)
    return list(found)


@contextmanager
def _recording() -> Generator[dict[Launch, None]]:
    """The launches of what is called meanwhile, which run nothing."""
    found: dict[Launch, None] = {}  # in order

    def record(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | float, ...],
        constants: dict[str, Constant],
    ) -> None:
        assert len(grid) <= 3, "a grid of Triton"
        types = tuple(map(_type_of, arguments))
        module, name = kernel.fn.__module__, kernel.fn.__name__
        warps, stages = (int(constants.pop(name) or 0) for name in ("num_warps", "num_stages"))
        found[Launch(module, name, types, tuple(constants.items()), warps, stages)] = None

    RECORDING.recorder = record
    try:
        yield found
    finally:
        RECORDING.recorder = None


def _type_of(argument: Tensor | float) -> str:
    if isinstance(argument, torch.Tensor):
        # Allocations begin at a multiple of it.
        aligned = argument.storage_offset() * argument.itemsize % ALIGNMENT == 0
        return _TYPES[argument.dtype] + (ALIGNED if aligned else "")
    return "fp32" if isinstance(argument, float) else "i32"


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _upload(values: NDArray[Any]) -> Tensor:
    return torch.empty_like(torch.as_tensor(values), device="meta")


class _Pass:
    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        # The compute capability decides what is refused, and nothing of a launch.
        self._ops = select(DeviceCapability("cuda", torch.bfloat16, 90))

    def run(self) -> None:
        self._copy_pages()
        self._tiled(64)
        for tokens in (1, 64, 8192):
            self._blocks(tokens)
        if self._sizes.fp8_group is not None:
            for tokens in (1, 32, 64, 8192):  # one of each tile
                self._fp8(tokens, self._sizes.fp8_group)
        for query_len, kv_len in (
            ([2000], [2000]),
            ([1] * 64, [400] * 64),
            ([1] * 64, [4000] * 64),
            ([1], [20000]),
        ):
            rows = np.array(query_len, np.int32), np.array(kv_len, np.int32)
            for window, cache in product({None, self._sizes.window}, self._sizes.caches):
                self._attend(*rows, window, cache)

    def _blocks(self, tokens: int) -> None:
        ops, sizes = self._ops, self._sizes
        x, weight = _empty(tokens, sizes.hidden), _empty(sizes.hidden)
        ops.rmsnorm(x, weight, 1e-5)
        ops.add_rmsnorm(x, x, weight, 1e-5)
        ops.rmsnorm_wide(x, weight.float(), 1e-5)
        ops.layernorm(x, weight, weight, 1e-5)
        ops.finite_rows(x)
        activation, width = sizes.activation, sizes.width
        if sizes.experts is None:
            assert isinstance(activation, str), "of a dense model"
            both = _empty(tokens, 2 * width)
            if activation == "silu":
                ops.silu_mul(both)
            else:
                ops.gate(both, activation)
            return
        count, chosen = sizes.experts
        routing = RoutingSpec(top_k=chosen, renormalised=True)
        logits = _empty(tokens, count, dtype=torch.float32)
        shape = (2 * width, sizes.hidden)
        weights = ExpertWeights(_empty(count, *shape), _empty(count, sizes.hidden, width))
        if isinstance(activation, tuple):
            biases = _empty(count, 2 * width), _empty(count, sizes.hidden)
            weights = weights._replace(gate_up_bias=biases[0], down_bias=biases[1])
        ops.experts(x, *ops.route(logits, None, routing), weights, activation)

    def _tiled(self, tokens: int) -> None:
        """Linears of deterministic inference; those of routers are in float32."""
        sizes = self._sizes
        queries, kv_heads, size = sizes.heads
        hidden, width, all_heads = sizes.hidden, sizes.width, (queries + 2 * kv_heads) * size
        shapes = [(all_heads, hidden), (hidden, queries * size), (sizes.vocabulary, hidden)]
        if sizes.experts is None:
            shapes += [(2 * width, hidden), (hidden, width)]
        else:
            router = _empty(sizes.experts[0], hidden).float()
            self._ops.linear_tiled(_empty(tokens, hidden).float(), router, None)
        self._ops.linear_tiled(_empty(tokens, hidden), _empty(all_heads, hidden), _empty(all_heads))
        for outputs, inputs in shapes:
            self._ops.linear_tiled(_empty(tokens, inputs), _empty(outputs, inputs), None)

    def _copy_pages(self) -> None:
        """Keys of four pages in all of 32 layers, to a buffer and back."""
        _, kv_heads, size = self._sizes.heads
        pool = _empty(32, 9000, PAGE_TOKENS * kv_heads * size * 2, dtype=torch.uint8)
        pages = _empty(4, dtype=torch.int32)
        self._ops.scatter_pages(pool, pages, self._ops.gather_pages(pool, pages))

    def _fp8(self, tokens: int, group: int) -> None:
        """Linears of attention, the first one also with Qwen2's bias, and of a dense block."""
        sizes = self._sizes
        queries, kv_heads, size = sizes.heads
        hidden, width, all_heads = sizes.hidden, sizes.width, (queries + 2 * kv_heads) * size
        shapes = [(all_heads, hidden, True), (all_heads, hidden, False)]
        shapes += [(hidden, queries * size, False)]
        if sizes.experts is None:
            shapes += [(2 * width, hidden, False), (hidden, width, False)]
        for outputs, inputs, biased in shapes:
            each = group or inputs
            scales = _empty(-(-inputs // each), outputs).float()
            bias = _empty(outputs) if biased else None
            matrix = Fp8Matrix(_empty(outputs, inputs, dtype=E4M3), scales, each, bias)
            self._ops.linear_fp8(_empty(tokens, inputs), matrix)

    def _attend(
        self,
        query_len: NDArray[np.int32],
        kv_len: NDArray[np.int32],
        window: int | None,
        cache: torch.dtype,
    ) -> None:
        sizes = self._sizes
        queries, kv_heads, size = sizes.heads
        shape = KvShape(PAGE_TOKENS, kv_heads, queries // kv_heads, size, torch.bfloat16, window)
        table = np.zeros((len(kv_len), -(-int(kv_len.max()) // PAGE_TOKENS)), np.int32)
        rows = AttentionMetadata(shape, table, query_len, kv_len, _upload)
        pages = _empty(*row_pages_shape(1000, PAGE_TOKENS, kv_heads, size), dtype=cache)
        tokens = int(query_len.sum())
        turns = _empty(tokens, 1, size)
        norm = NormWeights(_empty(size))
        norms = QkNormWeights(norm, norm, 1e-6) if sizes.head_norms else None
        heads = _empty(tokens, queries + 2 * kv_heads, size)
        slots = rows.slot_mapping
        q = self._ops.qk_norm_rope_store(heads, turns, turns, pages, pages, slots, norms)
        sinks = _empty(queries) if sizes.sinks else None
        self._ops.paged_attention(q, pages, pages, rows, size**-0.5, UNSCALED, sizes.softcap, sinks)

    def sample(self, rows: int) -> None:
        ops, vocabulary = self._ops, self._sizes.vocabulary
        logits, column = _empty(rows, vocabulary, dtype=torch.float32), _empty(rows).float()
        index = _empty(rows, dtype=torch.int64)
        if self._sizes.softcap is not None:
            ops.soft_capped(logits, self._sizes.softcap)
        ops.penalize(logits, index, index, column, column, column, column)
        ops.bias(logits, index, index, column)
        ops.mask(logits, index, _empty(rows, -(-vocabulary // 32), dtype=torch.int32))
        ops.argmax(logits)
        ops.finite_rows(logits)
        ops.logsumexp(logits, column)
        ops.sample(logits, column.double(), column, index, column, column)
        slots = index.int()
        ops.record_futures(slots, slots, index, _empty(rows, dtype=torch.bool), vocabulary)
        ops.resolve_futures(slots, slots)
        ops.decode_rows(_empty(4, rows, dtype=torch.int32), slots, slots[:, None], PAGE_TOKENS)
