"""The formulae of a step's cost, against what it launches in a dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.gpu import bench
from tests.gpu.costs import (
    AIMS,
    GROUPED_BYTES,
    ITEM_BYTES,
    LAUNCHES,
    TIMED,
    decode_cost,
    launches_of,
    used_experts,
)
from tests.kernels.dry_run import PAGE_TOKENS, in_groups, name_of, open_worker, recording, taken_by
from tests.kernels.no_data import META, uploaded
from tests.kernels.published import MODELS, RECURRENT_MODELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.triton.launch import RECORDING
from antiphon.model_worker.runner.device_runner import DeviceRunner

if TYPE_CHECKING:
    from tests.kernels.published import Sizes

KEYS = 5000
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach"})
EXPERTS = ("gate_up_kernel", "down_kernel")


class StepCounts(TorchDispatchMode):
    """Counts what is called meanwhile: weights, keys and values, products, and launches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.weight_bytes = self.cache_bytes = self.operations = self.launches = 0

    def take(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any
    ) -> None:
        self.launches += 1
        name = kernel.fn.__name__
        if name == "paged_attention_kernel":
            seen = min(KEYS, constants["WINDOW"] or KEYS)
            cached = seen * constants["KV_HEADS"] * constants["SIZE"] * self._rows
            self.cache_bytes += 2 * cached * arguments[1].itemsize
            self.operations += 4 * cached * constants["GROUP"]
        if name == "latent_kernel":
            cached = KEYS * constants["SIZE"] * self._rows
            self.cache_bytes += cached * arguments[1].itemsize
            self.operations += 4 * cached * constants["HEADS"]
        if name in EXPERTS:
            # Weights and their scales; what there is not has another one in its place.
            weights = {id(each): each for each in arguments if dims_of(each) > 2}
            pairs = max(each for each in arguments if isinstance(each, int))
            self.weight_bytes += sum(each.nbytes for each in weights.values())
            halves = 2 if name == "gate_up_kernel" else 1
            self.operations += 2 * pairs * halves * constants["HIDDEN"] * constants["WIDTH"]
        if name == "multiply_kernel":
            _, codes, scales, minimums, *_, tokens = arguments
            weights = {id(each): each for each in (codes, scales, minimums)}
            self.weight_bytes += sum(each.nbytes for each in weights.values())
            self.operations += 2 * tokens * constants["INPUTS"] * constants["OUTPUTS"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        composite = torch._C._dispatch_has_kernel_for_dispatch_key
        if composite(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        views = not schema.is_mutable and any(value.alias_info for value in schema.returns)
        self.launches += not views and name not in UNFILLED
        if name in ("mm", "addmm"):
            x, weight = args[-2:]
            self.weight_bytes += weight.nbytes
            self.operations += 2 * len(x) * weight.numel()
        if name == "bmm":
            x, weight = args
            self.weight_bytes += weight.nbytes
            self.operations += 2 * x.shape[1] * weight.numel()
        return func(*args, **kwargs)


def dims_of(argument: Any) -> int:
    return argument.dim() if isinstance(argument, Tensor) else 0


def counted(sizes: Sizes, layers: int, rows: int, way: dict[str, Any]) -> StepCounts:
    """Of a decode step by a graph."""
    model = open_worker(sizes.config(layers), positions=KEYS, ranks=sizes.ranks, **way)
    counts = StepCounts(rows)
    assert isinstance(model.runner, DeviceRunner)
    graphs = model.runner._decode
    RECORDING.recorder = counts.take
    try:
        with torch.inference_mode():
            graphs._outputs = graphs._allocate(rows)
            with counts:
                graphs._run(rows, lambda call: call())
    finally:
        RECORDING.recorder = None
    return counts


@pytest.mark.parametrize(
    ("name", "grouped"),
    [*((name, False) for name in LAUNCHES), *((name, True) for name in GROUPED_BYTES)],
)
def test_costs_are_those_of_what_is_launched(name: str, *, grouped: bool) -> None:
    sizes, rows = MODELS[name], 24
    way = in_groups(sizes.grouped) if grouped and sizes.grouped is not None else {}
    linear_bytes, expert_bytes = GROUPED_BYTES[name] if grouped else (ITEM_BYTES, ITEM_BYTES)
    found, more = (counted(sizes, layers, rows, way) for layers in (2, 4))
    each = (more.launches - found.launches) // 2
    dense = int(sizes.fields.get("first_k_dense_replace", 0))
    assert LAUNCHES[name][0] == each
    assert launches_of(name, 2, dense) == found.launches
    if dense:
        denser = replace(sizes, fields={**sizes.fields, "first_k_dense_replace": 2})
        assert launches_of(name, 2, 2) == counted(denser, 2, rows, way).launches
    cost = decode_cost(sizes, 2, rows, KEYS, linear_bytes, expert_bytes)
    idle = 0.0
    if sizes.routed is not None:
        count, chosen = sizes.routed
        unused = count - used_experts(count, chosen, rows)
        width = int(sizes.fields.get("moe_intermediate_size", sizes.width)) // sizes.ranks
        idle = (2 - dense) * expert_bytes * 3 * sizes.hidden * width * unused
    assert found.weight_bytes == pytest.approx(cost.weight_bytes + idle, rel=1e-9)
    assert found.cache_bytes == cost.cache_bytes
    assert found.operations == cost.operations
    assert launches_of(name, 4, dense) == more.launches


def test_costs_of_states_are_those_of_what_a_model_has_and_multiplies() -> None:
    """Of the pieces between its calls to attention and recurrences, and of its pools."""
    sizes, layers, rows = RECURRENT_MODELS["Qwen3-Next-80B-A3B"], 4, 24
    model = open_worker(sizes.config(layers), positions=KEYS)
    runner, counts = model.runner, StepCounts(rows)
    assert isinstance(runner, DeviceRunner)
    with torch.inference_mode(), taken_by(counts.take):
        runner._prefill._allocate(rows)
        with counts:
            runner._prefill._run(rows, lambda call: call())
    cost = decode_cost(sizes, layers, rows, KEYS)
    assert sizes.experts is not None
    count, chosen = sizes.experts
    head, unused = sizes.hidden * sizes.vocabulary, count - used_experts(count, chosen, rows)
    idle = layers * 3 * sizes.hidden * sizes.fields["moe_intermediate_size"] * unused
    expected = cost.weight_bytes + ITEM_BYTES * (idle - head)
    assert counts.weight_bytes == pytest.approx(expected, rel=1e-9)
    (pool,), (states,) = runner.pools, runner.states
    key_bytes = sum(each[:, 0].nbytes for each in pool.memory.tensors) / PAGE_TOKENS
    attended = 4 * KEYS * sizes.heads[0] * sizes.heads[2]
    state_bytes = sum(each[:, 0].nbytes for each in states.memory.tensors)
    assert cost.cache_bytes == rows * (KEYS * key_bytes + 2 * state_bytes)
    held = 6 * len(states.group.layers) * states.layer(0)[1][0].numel()
    assert cost.operations == counts.operations + rows * (2 * head + attended + held)


def test_few_tokens_read_few_experts() -> None:
    assert used_experts(128, 8, 1) == pytest.approx(8)
    assert used_experts(128, 8, 10_000) == pytest.approx(128)
    one, many = (decode_cost(MODELS["Qwen3-30B-A3B"], 48, rows, 1000) for rows in (1, 256))
    assert one.weight_bytes < many.weight_bytes / 8
    assert one.operations == many.operations / 256


class DryBench(bench.GpuBench):
    """Of a GPU that is not there: what is timed is launched, and runs nothing."""

    def __init__(self) -> None:
        super().__init__("interpreter", copy_bytes=16, side=4)
        self.device, self.upload = META, uploaded
        self.ops = select(DeviceCapability("cuda", torch.bfloat16))


def test_kernels_with_an_aim_are_those_that_are_timed() -> None:
    found: dict[str, set[str]] = {}
    timed = {"memory": bench.memory, "matmul": bench.matmul, "reads": bench.sampling}
    for aim, stage in timed.items():
        with recording() as launches:
            assert stage(DryBench())["aim"] == AIMS[aim]
        found[aim] = {name_of(launch) for launch in launches}
    assert found == TIMED
