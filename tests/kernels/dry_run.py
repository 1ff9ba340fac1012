"""The launches of Triton kernels of workers with published models, recorded without a device.

A worker's own code runs requests on tensors that have shapes and no data: what is recorded is what
a GPU would have to compile. Models are in bfloat16, as they are served, with the settings of a
worker at their defaults; and once more with weights and a KV cache of 8 bits, and with
deterministic inference where a model has one rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from tests.kernels.no_data import empty, open_without_data, uploaded
from tests.kernels.published import MODELS
from tests.models.model_loop import ModelLoop
from tests.support.worker import state

from antiphon.config.quantization import QuantizationMethod, online_quantization
from antiphon.kernels.attention import AttentionMetadata, KvShape, TextRows
from antiphon.kernels.experts import ExpertSlice, ExpertWeights
from antiphon.kernels.linear_fp8 import Fp8Matrix
from antiphon.kernels.linear_grouped import GroupedMatrix
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.recurrent import LayerStates, Recurrence, StateMetadata
from antiphon.kernels.triton.backend import E4M3_SM, INT8_SMS
from antiphon.kernels.triton.launch import RECORDING, Constant
from antiphon.layers.methods import LinearMethod
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.codec import pack_ids
from antiphon.wire.sampling import AllowTokens, LogitBias, SamplingParams
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from tests.kernels.published import Sizes
    from torch import Tensor

    from antiphon.config.quantization import QuantizationConfig
    from antiphon.kernels.triton.launch import Recorder
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.runner.opening import OpenModel

ALIGNMENT = 16
ALIGNED = ":16"
"""Behind the type of a pointer to so many whole bytes: only there are 128 bits loaded at once."""
PAGE_TOKENS = 64
"""Those of a worker whose settings leave them open."""
GRAPH_SIZES = (1, 2, 4, 8, 12, *range(16, 257, 8))
"""Batch sizes that a worker captures for up to 256 running requests."""
POSITIONS = 32768
PAGES = 1000
STEP_TOKENS = 8192
LENGTHS = (1, 30, 400, 900, 1800, 3500, 7000, 17000)
"""Tokens of prompts; keys of such decode rows are in 1, 1, 1, 2, 4, 7, 14 and 32 parts."""
SAMPLED: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"logit_bias": LogitBias(token_ids=pack_ids([7]), values=pack_floats([2.5]))},
    {"processors": (AllowTokens(token_ids=(0, 5)),)},
)
"""Parameters of requests, by which a step differs from another."""
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
    torch.int8: "*i8",
}


class Launch(msgspec.Struct, frozen=True):
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
        if self.module.endswith(".linear_int8"):
            return sm in INT8_SMS
        return sm >= E4M3_SM or not any("fp8e4nv" in argument for argument in self.arguments)


def name_of(launch: Launch) -> str:
    """The name of its kernel in the table."""
    return f"{launch.module.rpartition('.')[2]}.{launch.kernel.removesuffix('_kernel')}"


@cache
def every_launch(models: tuple[str, ...] = tuple(MODELS)) -> tuple[Launch, ...]:
    """Those of workers with these models, and of operations that only other models call."""
    with recording() as found:
        _call_others()
    for sizes in map(MODELS.__getitem__, models):
        for way in _ways(sizes):
            found.update(dict.fromkeys(worker_launches(sizes.config(2), ranks=sizes.ranks, **way)))
    return tuple(found)


def worker_launches(config: Mapping[str, Any], **changes: Any) -> tuple[Launch, ...]:
    """Those of the steps of one worker: see `open_worker`, `run_steps`."""
    with recording() as found:
        run_steps(open_worker(config, **changes))
    return tuple(found)


def in_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `open_without_data` for weights in groups, as config.json describes them."""
    return {"quantization": _stored(config), "kept": LinearMethod.GROUPED}


def open_worker(config: Mapping[str, Any], **changes: Any) -> OpenModel:
    """A model as a worker opens it by default; `changes` are parameters of `open_without_data`."""
    whole: dict[str, Any] = {
        "page_tokens": PAGE_TOKENS,
        "pages": PAGES,
        "rows": GRAPH_SIZES[-1],
        "positions": POSITIONS,
    }
    return open_without_data(config, **whole | changes)


def run_steps(model: OpenModel) -> None:
    """Let a worker run requests alone, all together and by graphs, and copy pages."""
    runner = model.runner
    assert isinstance(runner, DeviceRunner), "the runner of a device"
    loop = loop_of(model)
    for length in LENGTHS:
        loop.run([request(length, SAMPLED[0])])
    ways = [SAMPLED[number % len(SAMPLED)] for number in range(len(LENGTHS))]
    together = list(map(request, LENGTHS, ways))
    loop.run(together)
    assert runner.capture(GRAPH_SIZES).sizes == GRAPH_SIZES
    loop.run(together)
    runner.page_memories()
    # What follows the outcome of a step with logprobs reads numbers, of which there are none here.
    logits, temperature = (empty(3, n, dtype=torch.float32) for n in (model.spec.vocabulary, 1))
    runner.ops.logsumexp(logits, temperature[:, 0])


def loop_of(model: OpenModel, **changes: Any) -> ModelLoop:
    """The batching loop of a worker; `changes` are limits."""
    whole: dict[str, Any] = {
        "step_tokens_max": STEP_TOKENS,
        "chunk_tokens": STEP_TOKENS,
        "running_max": GRAPH_SIZES[-1],
        "context_tokens": POSITIONS,
    }
    return ModelLoop(model, overlap=True, **whole | changes)


def request(length: int, sampled: Mapping[str, Any], new_tokens: int = 3) -> RequestState:
    """A request with a prompt of so many tokens."""
    sampling = SamplingParams(max_new_tokens=new_tokens, **sampled)
    return state([0] * length, sampling=sampling)


def _ways(sizes: Sizes) -> list[dict[str, Any]]:
    """Parameters of `open_without_data`, for each way in which a model is recorded."""
    ways: list[dict[str, Any]] = [{}]
    if sizes.ranks == 1:
        ways.append({"deterministic": True})
    if sizes.fp8 is not None:
        narrow = {"cache_dtype": torch.float8_e4m3fn, "quantization": _quantization(sizes.fp8)}
        ways.append(narrow)
    if sizes.grouped is not None:
        ways.append(in_groups(sizes.grouped))
    return ways


def _quantization(kind: Literal["online", "block"]) -> QuantizationConfig:
    if kind == "online":
        return online_quantization(QuantizationMethod.FP8)
    return _stored({"quant_method": "fp8", "weight_block_size": [128, 128]})


def _stored(config: Mapping[str, Any]) -> QuantizationConfig:
    found = read_quantization(msgspec.json.encode({"quantization_config": config}))
    assert found is not None, "it is there"
    return found


def _call_others() -> None:
    ops = select(DeviceCapability("cuda", torch.bfloat16))
    x, weight, heads = empty(64, 4096), empty(4096), empty(64, 48, 128)
    ops.layernorm(x, weight, weight, 1e-5)
    ops.activate(x, "gelu_tanh")
    ops.sigmoid_mul(empty(64, 16, 128), heads[:, 32:])
    heads, texts = empty(364, 16, 64), TextRows([300, 64], uploaded)  # of BERT's large shape
    for window in (None, 64):
        ops.bidirectional_attention(heads, heads, heads, texts, 0.1, window)
    _call_experts_of_rank(ops)
    _call_grouped(ops)
    _call_latent(ops)
    _call_recurrent(ops, DELTA_NET)
    _call_recurrent(ops, MAMBA)


def _call_grouped(ops: Ops) -> None:
    """Square linears of MXFP4, NVFP4, int8 and blocks of GGUF files, in each tile; int8 both ways.

    Experts of NVFP4 have the shape of Qwen3-30B-A3B's.
    """
    half, whole = empty(4096, 2048, dtype=torch.uint8), empty(4096, 4096, dtype=torch.int8)
    powers, outputs = empty(128, 4096), empty(1, 4096, dtype=torch.float32)
    scales, more = (empty(groups, 4096, dtype=torch.float16) for groups in (128, 256))
    matrices = (
        GroupedMatrix(half, powers, None, 32),  # MXFP4
        _in_nvfp4(4096, 4096),
        GroupedMatrix(whole, outputs, None, 4096),  # int8
        GroupedMatrix(half, scales, scales, 32, 0),  # Q4_1, Q4_K
        GroupedMatrix(whole, scales, None, 32),  # Q5_0, Q8_0, IQ4_NL
        GroupedMatrix(whole, more, None, 16),  # Q6_K
        GroupedMatrix(whole, more, more, 16),  # Q4_K and Q6_K as one linear
    )
    for tokens, matrix in product((1, 32, 8192), matrices):
        ops.linear_grouped(empty(tokens, 4096), matrix)
    for tokens in (1, 32, 64, 8192):
        ops.linear_int8(empty(tokens, 4096), GroupedMatrix(whole, outputs, None, 4096))
    count, hidden, width = 128, 2048, 768
    of_experts = _in_nvfp4(count, 2 * width, hidden), _in_nvfp4(count, hidden, width)
    for tokens in (1, 8192):
        _call_experts(ops, tokens, ExpertWeights(*of_experts), hidden)


def _in_nvfp4(*size: int) -> GroupedMatrix:
    *experts, outputs, inputs = size
    return GroupedMatrix(
        empty(*experts, outputs, inputs // 2, dtype=torch.uint8),
        empty(*experts, inputs // 16, outputs, dtype=torch.float8_e4m3fn),
        None,
        16,
        tensor_scales=empty(*experts, outputs, dtype=torch.float32),
    )


def _call_experts_of_rank(ops: Ops) -> None:
    """A slice of DeepSeek-V3's experts, as each of 8 ranks has it, in tiles of each size."""
    count, hidden, width, group = 32, 7168, 2048, 128
    gate_up, down = (
        Fp8Matrix(
            empty(count, outputs, inputs, dtype=torch.float8_e4m3fn),
            empty(count, inputs // group, outputs, dtype=torch.float32),
            group,
        )
        for outputs, inputs in ((2 * width, hidden), (hidden, width))
    )
    weights, own = ExpertWeights(gate_up, down), ExpertSlice(0, 8 * count)
    for tokens in (1, 8192):
        _call_experts(ops, tokens, weights, hidden, own)


def _call_experts(
    ops: Ops, tokens: int, weights: ExpertWeights, hidden: int, own: ExpertSlice | None = None
) -> None:
    """Eight for each token."""
    chosen = empty(tokens, 8, dtype=torch.int64)
    shares = empty(tokens, 8, dtype=torch.float32)
    ops.experts(empty(tokens, hidden), chosen, shares, weights, "silu", own=own)


def _call_latent(ops: Ops) -> None:
    """DeepSeek-V3's attention with all heads, as attention groups have it.

    In deterministic inference its heads are multiplied by the op of linears of heads.
    """
    shape, size = KvShape(PAGE_TOKENS, 1, 128, 576, torch.bfloat16), (PAGES, 1, 64, 576)
    rows = ((1, 300), (1, 4000), (1, 17000), (500, 2000))
    for (tokens, keys), kind in product(rows, (torch.bfloat16, torch.float8_e4m3fn)):
        pages = empty(*size, dtype=kind)
        table = np.zeros((1, -(-keys // PAGE_TOKENS)), np.int32)
        lengths = np.array([tokens], np.int32), np.array([keys], np.int32)
        metadata = AttentionMetadata(shape, table, *lengths, uploaded)
        ops.paged_attention(empty(tokens, 128, 576), pages, pages, metadata, 0.1)
    for heads in (16, 128):
        ops.linear_heads(empty(64, heads, 192)[..., :128], empty(heads, 512, 128))
        ops.linear_heads(empty(64, heads, 576)[..., :512], empty(heads, 128, 512))


DELTA_NET = {"kind": "gated_delta", "key_heads": 16, "heads": 32, "rows": 128, "columns": 128}
"""A layer of Qwen3-Next-80B-A3B."""
MAMBA = {"kind": "ssd", "key_heads": 1, "heads": 48, "rows": 256, "columns": 64}
"""A layer of Falcon-H1's shape."""


def _call_recurrent(ops: Ops, sizes: Mapping[str, Any]) -> None:
    heads, columns, mamba = sizes["heads"], sizes["columns"], sizes["kind"] == "ssd"
    each, width = empty(heads, dtype=torch.float32), heads * columns
    channels = width + 2 * sizes["key_heads"] * sizes["rows"]
    layer = Recurrence(
        **sizes,
        conv=empty(4, channels),
        conv_bias=empty(channels) if mamba else None,
        decay_log=each,
        step_bias=each,
        skip=each if mamba else None,
        norm=empty(width if mamba else columns),
        norm_part=width if mamba else columns,
        norm_eps=1e-6,
        gate_first=mamba,
    )
    recurrent = empty(9, heads, sizes["rows"], columns, dtype=torch.float32)
    one = np.ones(1, np.int32)
    rows = StateMetadata(one, one[:, None] + 1, one * 5, one * 5, uploaded)
    states = LayerStates(0, empty(9, 3, channels), recurrent)
    rates = heads * (1 if mamba else 2)
    ops.recurrence(empty(5, width + channels + rates), layer, states, rows)


@contextmanager
def recording() -> Generator[dict[Launch, None]]:
    """The launches of what is called meanwhile, which run nothing."""
    found: dict[Launch, None] = {}  # in order

    def record(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | float, ...],
        constants: dict[str, Constant],
    ) -> None:
        assert len(grid) <= 3, "a grid of Triton"
        found[launch_of(kernel, arguments, constants)] = None

    with taken_by(record):
        yield found


@contextmanager
def seeing(see: Callable[[Launch], object]) -> Generator[None]:
    """See the launches of what is called meanwhile, which run, or are taken as before."""
    before = RECORDING.recorder

    def record(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | float, ...],
        constants: dict[str, Constant],
    ) -> None:
        see(launch_of(kernel, arguments, constants))
        if before is None:
            kernel[grid](*arguments, **constants)
        else:
            before(kernel, grid, arguments, constants)

    with taken_by(record):
        yield


@contextmanager
def taken_by(recorder: Recorder) -> Generator[None]:
    """A recorder takes the launches of what is called meanwhile."""
    before, RECORDING.recorder = RECORDING.recorder, recorder
    try:
        yield
    finally:
        RECORDING.recorder = before


def launch_of(
    kernel: Any, arguments: tuple[Tensor | float, ...], constants: Mapping[str, Constant]
) -> Launch:
    """What of a launch determines its binary."""
    types = tuple(map(_type_of, arguments))
    module, name = kernel.fn.__module__, kernel.fn.__name__
    rest = dict(constants)
    warps, stages = (int(rest.pop(name) or 0) for name in ("num_warps", "num_stages"))
    return Launch(module, name, types, tuple(rest.items()), warps, stages)


def _type_of(argument: Tensor | float) -> str:
    if isinstance(argument, torch.Tensor):
        # Allocations begin at a multiple of it.
        aligned = argument.storage_offset() * argument.itemsize % ALIGNMENT == 0
        return _TYPES[argument.dtype] + (ALIGNED if aligned else "")
    return "fp32" if isinstance(argument, float) else "i32"
